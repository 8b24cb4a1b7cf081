"""decode(encode_delta(base, new)) over base is new, bit for bit; whatever else arrives is a DeltaError."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from anabranch.kernels.delta_codec import decode, encode_anchor, encode_delta, uint_dtype
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.layout import DTYPE_BYTES, Layout

DTYPES = sorted(DTYPE_BYTES)


@st.composite
def step_pairs(draw: st.DrawFn) -> tuple[Layout, dict, dict]:
    shapes = draw(st.lists(hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=40), min_size=1, max_size=4))
    layout = Layout.build([(f"t{i}", draw(st.sampled_from(DTYPES)), shape) for i, shape in enumerate(shapes)])
    base, new = {}, {}
    for spec in layout.tensors:
        bits = draw(hnp.arrays(uint_dtype(spec.dtype), spec.numel))
        changed = bits.copy()
        how = draw(st.sampled_from(["none", "one", "some", "all"]))
        where = {
            "none": np.zeros(spec.numel, bool),
            "one": np.arange(spec.numel) == spec.numel // 2,
            "some": draw(hnp.arrays(bool, spec.numel)),
            "all": np.ones(spec.numel, bool),
        }[how]
        changed[where] ^= draw(hnp.arrays(uint_dtype(spec.dtype), spec.numel))[where] | 1
        base[spec.name], new[spec.name] = bits, changed
    return layout, base, new


def apply(layout: Layout, base: dict, chunks: tuple[bytes, ...]) -> dict:
    state = {name: bits.copy() for name, bits in base.items()}
    for change in decode(layout, chunks):
        if change.indices is None:
            state[change.name][:] = change.bits
        else:
            state[change.name][change.indices] = change.bits
    return state


@given(step_pairs())
def test_round_trip_is_exact(pair: tuple[Layout, dict, dict]) -> None:
    layout, base, new = pair
    encoded = encode_delta(layout, base, new)
    result = apply(layout, base, encoded.chunks)
    assert all(np.array_equal(result[n], new[n]) for n in new)
    again = apply(layout, result, encoded.chunks)  # absolute values: applying twice changes nothing
    assert all(np.array_equal(again[n], new[n]) for n in new)
    garbage = {n: np.full_like(b, 7) for n, b in base.items()}
    anchored = apply(layout, garbage, encode_anchor(layout, new).chunks)
    assert all(np.array_equal(anchored[n], new[n]) for n in new)


def test_equal_states_give_an_empty_delta() -> None:
    layout = Layout.build([("a", "bf16", (100,))])
    state = {"a": np.arange(100, dtype=np.uint16)}
    encoded = encode_delta(layout, state, state)
    assert (encoded.chunks, encoded.changed_elements) == ((), 0)


def test_minus_zero_and_nan_payloads_are_changes() -> None:
    layout = Layout.build([("a", "bf16", (64,))])
    base = {"a": np.zeros(64, np.uint16)}
    new = {"a": base["a"].copy()}
    new["a"][[3, 5]] = [0x8000, 0x7FC1]  # −0.0; a NaN with a payload
    assert encode_delta(layout, base, new).changed_elements == 2
    assert np.array_equal(apply(layout, base, encode_delta(layout, base, new).chunks)["a"], new["a"])


@given(step_pairs(), st.data())
def test_mutated_chunks_are_refused_by_name_or_decode_within_the_layout(
    pair: tuple[Layout, dict, dict], data: st.DataObject
) -> None:
    layout, _, new = pair
    chunks = encode_anchor(layout, new).chunks
    if not chunks:
        return
    raw = bytearray(zstandard.ZstdDecompressor().decompress(chunks[0]))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for mutant in (bytes(raw), bytes(raw[:cut])):
        try:
            changes = decode(layout, [zstandard.ZstdCompressor().compress(mutant)])
        except DeltaError:
            continue
        for change in changes:
            spec = layout.by_name[change.name]
            assert change.bits.size <= spec.numel
            if change.indices is not None and change.indices.size:
                assert change.indices[-1] < spec.numel
                assert (np.diff(change.indices) > 0).all()


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(junk: bytes) -> None:
    with pytest.raises(DeltaError):
        decode(Layout.build([("a", "f32", (3,))]), [junk])


def test_a_decompression_bomb_is_refused_before_it_is_unpacked() -> None:
    bomb = zstandard.ZstdCompressor().compress(b"ABD1" + bytes(2**26))
    with pytest.raises(DeltaError, match="the layout allows"):
        decode(Layout.build([("a", "f32", (3,))]), [bomb])
