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

from anabranch.kernels.delta_chunk import ChunkKind, Piece, put_varint, read_head, take_varint, write_head
from anabranch.kernels.delta_codec import (
    Encoded,
    apply_changes,
    decode,
    decode_anchor,
    decode_chunk,
    encode_anchor,
    encode_delta,
    encode_job,
    inspect_chunk,
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
    assert len(together) == len(decode(layout, chunks, base))


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


# ---- what is refused


def test_states_that_do_not_fit_the_layout_are_refused_by_name() -> None:
    layout = Layout.build([("a", "bf16", (4, 6)), ("b", "f32", (2,))])
    good = {"a": np.zeros(24, np.uint16), "b": np.zeros(2, np.uint32)}
    square = np.zeros((6, 4), np.uint16)
    for bad, message in [
        ({"a": good["a"]}, "'b' is missing"),
        (good | {"a": np.zeros(23, np.uint16)}, "'a' holds 23"),
        (good | {"b": np.zeros(2, np.float32)}, "'b' holds 2 x float32"),
        (good | {"a": square.T}, "'a' is not contiguous"),
        (good | {"a": np.zeros(48, np.uint16)[::2]}, "'a' is not contiguous"),
    ]:
        for pair in ((bad, good), (good, bad)):
            with pytest.raises(DeltaError, match=message):
                encode_delta(layout, *pair)
        with pytest.raises(DeltaError, match=message):
            decode(layout, [], bad)


def test_the_wrong_base_is_noticed_or_harmless() -> None:
    """The base digest in the manifest is what refuses it; the codec alone never writes outside the layout."""
    rng = np.random.default_rng(1)
    layout = Layout.build([("a", "bf16", (5_000,))])
    base = {"a": rng.integers(0, 2**16, 5_000, np.uint16)}
    new = {"a": base["a"] ^ (rng.random(5_000) < 0.05).astype(np.uint16)}
    chunks = encode_delta(layout, base, new).chunks
    with pytest.raises(DeltaError, match="do not exist in the base"):
        decode(layout, chunks, {"a": np.zeros(5_000, np.uint16)})


def test_two_chunks_that_cover_the_same_elements_are_refused() -> None:
    layout = Layout.build([("a", "bf16", (100,))])
    state = {"a": np.arange(100, dtype=np.uint16)}
    (chunk,) = encode_anchor(layout, state).chunks
    with pytest.raises(DeltaError, match="chunks 0 and 1 both change 'a'"):
        decode(layout, [chunk, chunk], state)


def test_a_decompression_bomb_is_refused_before_it_is_unpacked() -> None:
    layout = Layout.build([("a", "f32", (3,))])
    bomb = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(
            format=zstandard.FORMAT_ZSTD1_MAGICLESS, write_content_size=False, compression_level=1
        )
    ).compress(bytes(2**26))
    chunk = bytes(write_head(layout, ChunkKind.ZSTD, [Piece(0, 0, 3)])) + bomb
    with pytest.raises(DeltaError, match="zstd"):
        decode(layout, [chunk], {"a": np.zeros(3, np.uint32)})


def test_a_count_without_bytes_behind_it_allocates_nothing() -> None:
    layout = Layout.build([("a", "u8", (2**25,))])
    chunk = write_head(layout, ChunkKind.SPARSE, [Piece(0, 0, 2**25)])
    put_varint(chunk, 2**25)
    with pytest.raises(DeltaError, match="announces 33554432 changes"):
        inspect_chunk(layout, bytes(chunk) + bytes(20))


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([(0, 0, 4), (0, 3, 5)], None),  # overlaps cannot be written: starts count on from the segment before
        ([(0, 0, 101)], r"\[0, 101\) of 'a', which is bf16 \[100\]"),
        ([(1, 0, 2)], "'b', which is f32"),
        ([(7, 0, 1)], "names tensor 7 of 2"),
        ([(0, 100, 101)], r"\[100, 101\) of 'a'"),
    ],
)
def test_segments_outside_the_layout_are_refused(pieces: list[tuple[int, int, int]], message: str | None) -> None:
    layout = Layout.build([("a", "bf16", (100,)), ("b", "f32", (10,))])
    chunk = bytearray([ChunkKind.RAW << 4])
    put_varint(chunk, len(pieces))
    for tensor, start, stop in pieces:
        for number in (2 * tensor + 1, start, stop - start):
            put_varint(chunk, number)
    chunk += bytes(2 * sum(stop - start for _, start, stop in pieces))
    if message is None:
        assert [p.start for p in read_head(layout, bytes(chunk)).pieces] == [0, 4 + 3]
        return
    with pytest.raises(DeltaError, match=message):
        read_head(layout, bytes(chunk))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_stay_inside_the_layout(junk: bytes) -> None:
    layout = Layout.build([("a", "f32", (3,)), ("b", "bf16", (700,))])
    base = {"a": np.zeros(3, np.uint32), "b": np.arange(700, dtype=np.uint16)}
    try:
        changes = decode(layout, [junk], base)
    except DeltaError:
        return
    _inside(layout, changes)


def _inside(layout: Layout, changes: Any) -> None:
    for change in changes:
        spec = layout.by_name[change.name]
        assert change.bits.dtype == FORMS[spec.dtype].uint
        if change.indices is None:
            assert 0 <= change.start <= change.start + change.bits.size <= spec.numel
        else:
            assert change.indices.size == change.bits.size
            assert change.indices.size == 0 or (change.indices[0] >= 0 and change.indices[-1] < spec.numel)
            assert (np.diff(change.indices) > 0).all()


@given(state_pairs(max_size=600), st.data())
@settings(max_examples=300)
def test_mutated_chunks_are_refused_by_name_or_stay_inside_the_layout(pair: Any, data: st.DataObject) -> None:
    """Without digests around them: what is read from a damaged chunk never leaves the layout, and nothing crashes."""
    layout, base, new = pair
    anchor = data.draw(st.booleans())
    chunks = (encode_anchor(layout, new) if anchor else encode_delta(layout, base, new)).chunks
    if not chunks:
        return
    raw = bytearray(data.draw(st.sampled_from(chunks)))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    source = ArraySource(layout, base)
    for mutant in (bytes(raw), bytes(raw[: data.draw(st.integers(0, len(raw)))]), bytes(raw) + b"\0"):
        for read in (lambda m: decode_chunk(layout, m, source), lambda m: inspect_chunk(layout, m)):
            try:
                result = read(mutant)
            except DeltaError as error:
                assert str(error)  # noqa: PT017 - a raise is allowed, not required
                continue
            if isinstance(result, list):
                _inside(layout, result)


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


@given(st.integers(0, 2**63 - 1))
def test_varints_go_to_63_bits(x: int) -> None:
    data = bytearray()
    put_varint(data, x)
    assert take_varint(bytes(data), 0) == (x, len(data))
    with pytest.raises(DeltaError):
        take_varint(bytes(data[:-1]), 0)


def test_a_varint_beyond_63_bits_or_longer_than_need_be_is_refused() -> None:
    for data in (b"\xff" * 9 + b"\x01", b"\x80\x00", b"\xff" * 200):
        with pytest.raises(DeltaError):
            take_varint(data, 0)
