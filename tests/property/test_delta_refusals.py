"""What a decoder refuses, by name: states that do not fit, damaged chunks, bombs, numbers that would wrap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.kernels.delta_chunk import (
    MAX_PARTIAL_SEGMENTS,
    ChunkKind,
    Piece,
    put_varint,
    read_head,
    take_varint,
    write_head,
)
from anabranch.kernels.delta_codec import (
    decode,
    decode_chunk,
    encode_anchor,
    encode_delta,
    inspect_chunk,
)
from anabranch.kernels.delta_dtypes import FORMS
from anabranch.kernels.delta_plan import ArraySource
from anabranch.kernels.delta_reference import BitWriter
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.layout import Layout
from tests.property.delta_strategies import state_pairs


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


def test_a_wrong_base_with_too_few_elements_of_a_class_is_noticed() -> None:
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


def test_a_whole_tensor_after_a_part_of_it_is_refused() -> None:
    layout = Layout.build([("a", "u8", (100,))])
    for rest in (b"\x00", b"\x01\x00\x00"):  # all of it; from the end of the part to the end, which is fine
        chunk = bytes([ChunkKind.RAW << 4 | FORMS["u8"].code, 2, 1, 10, 5]) + rest + bytes(5 + 85)
        if rest == b"\x00":
            with pytest.raises(DeltaError, match="all of tensor 0 after a part of it"):
                read_head(layout, chunk)
        else:
            assert read_head(layout, chunk).pieces == (Piece(0, 10, 15), Piece(0, 15, 100))


def test_segments_without_end_are_refused() -> None:
    """Each costs a decoder more than its bytes; no encoder has use for so many."""
    layout = Layout.build([("a", "u8", (2**24,))])
    count = MAX_PARTIAL_SEGMENTS + 1
    chunk = bytearray([ChunkKind.RAW << 4 | FORMS["u8"].code])
    put_varint(chunk, count)
    with pytest.raises(DeltaError, match="more than 65536 segments"):
        read_head(layout, bytes(chunk) + b"\x01\x01\x01" * count + bytes(count))


def _sparse(layout: Layout, total: int, out: BitWriter) -> bytes:
    chunk = write_head(layout, ChunkKind.SPARSE, [Piece(0, 0, layout.tensors[0].numel)])
    put_varint(chunk, total)
    return bytes(chunk) + out.tobytes()


def test_numbers_that_would_wrap_around_are_refused() -> None:
    """2⁶⁴ + 1 is not 1: neither as a count, nor as a gap, nor as a step."""
    layout = Layout.build([("a", "u8", (100,))])
    source = ArraySource(layout, {"a": np.zeros(100, np.uint8)})
    count = BitWriter()
    count.exp_golomb(0, 0)
    count.exp_golomb(2**64, 8)
    for code, number in ((127, 2**64 + 7), (2, 2**64 + 1), (66, 2**63 + 5)):
        gap = BitWriter()
        gap.exp_golomb(0, 0)
        gap.exp_golomb(0, 8)
        gap.field(code, 7)
        gap.golomb(number, ([1, 2, 3] + [(4 + i % 4) << i // 4 for i in range(123)])[code - 2])
        gap.field(0, 7)
        gap.field(0, 1)
        with pytest.raises(DeltaError):
            decode_chunk(layout, _sparse(layout, 1, gap), source)
    with pytest.raises(DeltaError):
        decode_chunk(layout, _sparse(layout, 1, count), source)


@pytest.mark.parametrize("flags", [{"write_checksum": True}, {"write_content_size": True}, {"window_log": 21}])
def test_frames_that_say_more_than_the_format_allows_are_refused(flags: dict[str, Any]) -> None:
    layout = Layout.build([("a", "u8", (2**22,))])
    data = bytes(2**22)
    parameters = {"format": zstandard.FORMAT_ZSTD1_MAGICLESS, "write_content_size": False, "compression_level": 1}
    compressor = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(**parameters | flags))
    chunk = bytes(write_head(layout, ChunkKind.ZSTD, [Piece(0, 0, 2**22)])) + compressor.compress(data)
    with pytest.raises(DeltaError, match="zstd frame with a"):
        inspect_chunk(layout, chunk)
