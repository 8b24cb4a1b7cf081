"""decode(encode_delta(base, new)) over base is new, bit for bit; whatever else arrives is a DeltaError."""

from __future__ import annotations

import dataclasses
import tracemalloc
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.kernels.delta_chunk import Piece, read_head
from anabranch.kernels.delta_codec import (
    Encoded,
    apply_changes,
    decode,
    decode_anchor,
    decode_chunk,
    encode_anchor,
    encode_delta,
    encode_job,
)
from anabranch.kernels.delta_dtypes import FORMS
from anabranch.kernels.delta_plan import ArraySource, plan_jobs
from anabranch.kernels.workers import Workers
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.layout import Layout
from tests.property.delta_strategies import DTYPES, state_pairs

State = dict[str, Any]


def applied(layout: Layout, base: State, chunks: tuple[bytes, ...]) -> State:
    state = {name: bits.copy() for name, bits in base.items()}
    apply_changes(state, decode(layout, chunks, base))
    return state


def same(a: State, b: State) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in b)


def payload(encoded: Encoded) -> int:
    return sum(map(len, encoded.chunks))


@given(state_pairs())
@settings(max_examples=300)
def test_round_trip_is_exact(pair: tuple[Layout, State, State]) -> None:
    layout, base, new = pair
    encoded = encode_delta(layout, base, new)
    assert same(applied(layout, base, encoded.chunks), new)
    counts = [int((base[t.name] != new[t.name]).sum()) for t in layout.tensors]
    assert (list(encoded.changed_by_tensor), encoded.changed_elements) == (counts, sum(counts))
    changes = decode(layout, encoded.chunks, base)
    apply_changes(base, changes)
    apply_changes(base, changes)  # new bits, not differences: applying them twice is applying them once
    assert same(base, new)


@given(state_pairs())
def test_an_anchor_needs_no_base(pair: tuple[Layout, State, State]) -> None:
    layout, _, new = pair
    garbage = {name: np.full_like(bits, 7) for name, bits in new.items()}
    chunks = encode_anchor(layout, new).chunks
    assert same(applied(layout, garbage, chunks), new)
    for workers in (None, Workers(2)):
        state = {name: bits.copy() for name, bits in garbage.items()}
        decode_anchor(layout, chunks, state, workers)
        assert same(state, new)


def test_what_is_no_full_snapshot_is_not_taken_for_one() -> None:
    layout = Layout.build([("a", "bf16", (1000,)), ("b", "f32", (10,))])
    base = {"a": np.arange(1000, dtype=np.uint16), "b": np.arange(10, dtype=np.uint32)}
    new = base | {"a": base["a"] + (np.arange(1000) % 50 == 0).astype(np.uint16)}
    state = {name: bits.copy() for name, bits in base.items()}
    whole = encode_anchor(layout, new).chunks
    for chunks in (
        whole[:1],
        whole[1:],
        (),
        encode_delta(layout, base, new).chunks,
        (*whole, whole[0]),
        (whole[0], b""),
    ):
        with pytest.raises(DeltaError):
            decode_anchor(layout, chunks, state)
        assert same(state, base)
    with pytest.raises(DeltaError, match="chunk 1 is refused"):
        decode_anchor(layout, (whole[0], whole[1][:-1]), state)


@given(state_pairs(), st.integers(1, 700), st.integers(2, 4))
@settings(max_examples=60)
def test_threads_and_small_chunks_change_nothing_but_the_cut(pair: Any, chunk_elements: int, threads: int) -> None:
    layout, base, new = pair
    jobs = plan_jobs(layout, chunk_elements=chunk_elements)
    assert all(sum(p.size for p in job) <= chunk_elements for job in jobs)
    assert all(len({layout.tensors[p.tensor].dtype for p in job}) == 1 for job in jobs)
    source, target = ArraySource(layout, base), ArraySource(layout, new)
    chunks = tuple(c for job in jobs for c in encode_job(layout, job, source, target).chunks)
    assert same(applied(layout, base, chunks), new)
    with Workers(threads) as workers:
        assert encode_delta(layout, base, new, workers) == encode_delta(layout, base, new)
        together = decode(layout, chunks, base, workers)
    state = {name: bits.copy() for name, bits in base.items()}
    apply_changes(state, together)
    assert same(state, new)


def test_equal_states_give_an_empty_delta() -> None:
    layout = Layout.build([("a", "bf16", (100,))])
    state = {"a": np.arange(100, dtype=np.uint16)}
    encoded = encode_delta(layout, state, state)
    assert (encoded.chunks, encoded.changed_elements, encoded.changed_tensors) == ((), 0, ())


def test_minus_zero_and_nan_payloads_are_changes() -> None:
    layout = Layout.build([("a", "bf16", (64,))])
    base = {"a": np.zeros(64, np.uint16)}
    new = {"a": base["a"].copy()}
    new["a"][[3, 5]] = [0x8000, 0x7FC1]  # −0.0; a NaN with a payload
    encoded = encode_delta(layout, base, new)
    assert encoded.changed_elements == 2
    assert same(applied(layout, base, encoded.chunks), new)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_of_every_size_around_a_block(dtype: str) -> None:
    """Blocks are 64 elements; heavy classes are used from 256 on."""
    rng = np.random.default_rng(0)
    for n in (0, 1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025):
        layout = Layout.build([("a", dtype, (n,))])
        base = {"a": rng.integers(0, np.iinfo(FORMS[dtype].uint).max, n, FORMS[dtype].uint)}
        for density in (0.02, 0.6, 1.0):
            where = rng.random(n) < density
            new = {"a": base["a"] + where.astype(FORMS[dtype].uint)}
            assert same(applied(layout, base, encode_delta(layout, base, new).chunks), new)


def test_unchanged_rows_are_left_out_of_the_segments() -> None:
    """An embedding of which few rows were touched costs by its changes, not by its size."""
    rng = np.random.default_rng(0)
    layout = Layout.build([("embed", "bf16", (20_000, 64))])
    base = {"embed": rng.normal(size=20_000 * 64).astype(np.float32).view(np.uint32).__rshift__(16).astype(np.uint16)}
    new = {"embed": base["embed"].copy()}
    rows = np.sort(rng.choice(20_000, 40, replace=False))
    for row in rows:
        where = row * 64 + np.flatnonzero(rng.random(64) < 0.5)
        new["embed"][where] += 1
    encoded = encode_delta(layout, base, new)
    (head,) = [read_head(layout, c) for c in encoded.chunks]
    assert sum(p.size for p in head.pieces) < 40 * 64 * 2
    assert payload(encoded) < 1.2 * encoded.changed_elements
    assert same(applied(layout, base, encoded.chunks), new)


def test_a_dense_chunk_is_never_larger_than_its_elements_under_plain_zstd() -> None:
    """Also where a sample would tell otherwise, and of a tensor in several chunks: then each by itself."""
    rng = np.random.default_rng(0)
    misleading = np.zeros(2**20, np.uint16)
    for start in range(0, misleading.size, misleading.size // 16):  # noise where samples are taken, zeros elsewhere
        misleading[start : start + 2048] = rng.integers(0, 2**16, 2048, np.uint16)
    for new, chunk_elements in (
        (misleading, 2**22),
        (np.resize(rng.integers(0, 2**16, 20_000, np.uint16), 200_000), 70_000),
    ):
        layout = Layout.build([("a", "bf16", (new.size,))])
        source, target = ArraySource(layout, {"a": new ^ 1}), ArraySource(layout, {"a": new})
        for job in plan_jobs(layout, chunk_elements=chunk_elements):
            (chunk,) = encode_job(layout, job, source, target).chunks
            (piece,) = job
            plain = zstandard.ZstdCompressor(level=1).compress(new[piece.start : piece.stop].tobytes())
            assert len(chunk) <= len(plain) + 4  # where a part of a tensor begins and how long it is


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f8_e4m3", "f8_e5m2", "i64", "u8", "bool"])
@pytest.mark.parametrize("n", [1, 7, 200, 5_000, 300_000])
@pytest.mark.parametrize("kind", ["weights", "noise", "constant", "period"])
def test_all_elements_changed_is_never_larger_than_plain_zstd(dtype: str, n: int, kind: str) -> None:
    rng = np.random.default_rng(n)
    form = FORMS[dtype]
    top = np.iinfo(form.uint).max
    weights = (rng.normal(size=n).astype(np.float64).view(np.uint64) >> np.uint64(64 - 8 * form.width_bytes)).astype(
        form.uint
    )
    new = {
        "weights": weights,
        "noise": rng.integers(0, top, n, form.uint, endpoint=True),
        "constant": np.full(n, 5, form.uint),
        "period": np.resize(rng.integers(0, top, 13, form.uint), n),
    }[kind]
    layout = Layout.build([("a", dtype, (n,))])
    encoded = encode_delta(layout, {"a": new ^ form.uint(top // 3 | 1)}, {"a": new})
    assert encoded.changed_elements == n
    assert payload(encoded) <= len(zstandard.ZstdCompressor(level=1).compress(new.tobytes()))


def test_a_step_that_flips_half_of_all_elements_costs_what_the_steps_cost() -> None:
    """Not the elements: a dense step of ±1 is coded by its signs."""
    rng = np.random.default_rng(0)
    layout = Layout.build([("a", "bf16", (200_000,))])
    base = {"a": (rng.normal(0, 0.02, 200_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)}
    new = {"a": base["a"] + np.where(rng.random(200_000) < 0.5, 1, 0).astype(np.uint16)}
    assert payload(encode_delta(layout, base, new)) < 0.45 * encode_delta(layout, base, new).changed_elements


def test_a_chunk_of_many_tensors_is_decoded_in_memory_for_its_changes() -> None:
    rng = np.random.default_rng(0)
    layout = Layout.build([(f"expert.{i:05d}", "bf16", (64,)) for i in range(5_000)])
    base = {t.name: rng.integers(0, 2**16, 64, np.uint16) for t in layout.tensors}
    new = {name: bits ^ (rng.random(64) < 0.1).astype(np.uint16) for name, bits in base.items()}
    (chunk,) = encode_delta(layout, base, new).chunks
    source = ArraySource(layout, base)
    decode_chunk(layout, chunk, source)
    tracemalloc.start()
    try:
        changes = decode_chunk(layout, chunk, source)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(changes) > 4_500
    assert peak < 20 * 2**20  # of 320,000 elements, 32,000 of which change


def test_a_dense_step_is_handed_out_in_the_memory_of_the_model() -> None:
    """Single elements cost 10 bytes each where the whole tensor costs 2."""
    rng = np.random.default_rng(0)
    layout = Layout.build([("a", "bf16", (500_000,)), ("b", "bf16", (500_000,))])
    base = {t.name: rng.integers(0, 2**15, t.numel, np.uint16) for t in layout.tensors}
    new = {"a": base["a"] + 1, "b": base["b"] + (rng.random(500_000) < 0.05).astype(np.uint16)}
    changes = decode(layout, encode_delta(layout, base, new).chunks, base)
    assert [change.indices is None for change in sorted(changes, key=lambda c: c.name)] == [True, False]
    held = sum(c.bits.nbytes + (0 if c.indices is None else c.indices.nbytes) for c in changes)
    assert held < 1.3 * base["a"].nbytes
    apply_changes(base, changes)
    assert same(base, new)


# ---- numbers beyond 2³¹


def test_indices_of_tensors_beyond_two_to_the_31_are_64_bit() -> None:
    """The arithmetic of a tensor of 2³⁵ elements, of which one piece is read."""
    size, at = 2**35, 2**34 + 12_345
    layout = Layout.build([("huge", "f8_e4m3", (size,)), ("next", "f8_e4m3", (10,))])
    jobs = plan_jobs(layout, chunk_elements=2**22)
    assert sum(p.size for job in jobs for p in job) == size + 10
    assert max(sum(p.size for p in job) for job in jobs) <= 2**22
    assert jobs[-1][-1] == Piece(1, 0, 10)

    piece = Piece(0, at, at + 5_000)
    old = np.random.default_rng(0).integers(0, 256, 5_000, np.uint8)
    new = old.copy()
    new[[0, 17, 4_999]] += 1

    @dataclasses.dataclass
    class Window:
        bits: Any

        def read(self, name: str, start: int, stop: int) -> Any:
            return self.bits[start - at : stop - at]

    (chunk,) = encode_job(layout, [piece], Window(old), Window(new)).chunks
    changes = decode_chunk(layout, chunk, Window(old))
    indices = np.concatenate([c.indices for c in changes])
    assert indices.dtype == np.int64
    assert indices.tolist() == [at, at + 17, at + 4_999]
    assert np.concatenate([c.bits for c in changes]).tolist() == new[[0, 17, 4_999]].tolist()
