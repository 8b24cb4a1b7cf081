"""The frame of a chunk: which dtype, which pieces of which tensors, and a body of one of four kinds.

    u8 kind · 16 + dtype code | varint S | S × (varint 2 · tensor + part [, varint start, varint length]) | body

Numbers are LEB128 varints. `tensor` counts on from the segment before (the first from 0). Part 0 is the whole tensor;
with part 1, `start` counts on from the segment before if that is of the same tensor, and length 0 is "to the end".

Invariant: `read_head` returns pieces inside the layout, of one dtype, ascending and disjoint, and at most
MAX_CHUNK_ELEMENTS elements in all, or raises DeltaError. Docs: docs/delta-format.md. Held by
tests/property/test_delta_codec.py.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.kernels.delta_dtypes import DTYPE_OF_CODE, FORMS
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.layout import Layout

MAX_CHUNK_ELEMENTS = 2**25
MAX_PARTIAL_SEGMENTS = 2**16
_VARINT_BYTES = 9  # 63 bits


class ChunkKind(enum.IntEnum):
    SPARSE = 1  # classes of changes: kernels/delta_bits.py
    PLANES = 2  # all elements as byte planes: kernels/byte_planes.py
    ZSTD = 3  # all elements, little-endian, one zstd frame
    RAW = 4  # all elements, little-endian


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of `layout.tensors[tensor]`."""

    tensor: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ChunkHead:
    kind: ChunkKind
    dtype: str
    pieces: tuple[Piece, ...]
    body_at: int

    @property
    def elements(self) -> int:
        return sum(p.size for p in self.pieces)


def put_varint(out: bytearray, x: int) -> None:
    while x > 0x7F:
        out.append(x & 0x7F | 0x80)
        x >>= 7
    out.append(x)


def take_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """(number, position after it). Raises DeltaError at the end of `data` or beyond 63 bits."""
    x = 0
    for i in range(_VARINT_BYTES):
        if at + i >= len(data):
            raise DeltaError("it ends in the middle of a number")
        byte = data[at + i]
        x |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            if byte == 0 and i:
                raise DeltaError("a number is longer than it need be")
            return x, at + i + 1
    raise DeltaError("a number has more than 63 bits")


def write_head(layout: Layout, kind: ChunkKind, pieces: Sequence[Piece]) -> bytearray:
    """The bytes before the body. `pieces` are as `read_head` returns them."""
    out = bytearray([kind << 4 | FORMS[layout.tensors[pieces[0].tensor].dtype].code])
    put_varint(out, len(pieces))
    tensor, end = 0, 0
    for piece in pieces:
        numel = layout.tensors[piece.tensor].numel
        part = piece.size < numel
        put_varint(out, 2 * (piece.tensor - tensor) + part)
        if part:
            put_varint(out, piece.start - (end if piece.tensor == tensor else 0))
            put_varint(out, 0 if piece.stop == numel else piece.size)
        tensor, end = piece.tensor, piece.stop
    return out


def read_head(layout: Layout, chunk: bytes) -> ChunkHead:
    """Raises DeltaError as the module says; the message names what is wrong, not the chunk."""
    if not chunk:
        raise DeltaError("it is empty")
    try:
        kind, dtype = ChunkKind(chunk[0] >> 4), DTYPE_OF_CODE[chunk[0] & 15]
    except (ValueError, KeyError):
        raise DeltaError(f"it begins with {chunk[0]:#04x}, which is no kind and dtype of this format") from None
    count, at = take_varint(chunk, 1)
    if not 1 <= count <= len(chunk) - at:
        raise DeltaError(f"it announces {count} segments")
    pieces, tensor, end, elements, partial = [], 0, 0, 0, 0
    for i in range(count):
        which, at = take_varint(chunk, at)
        start, length = 0, 0
        if which & 1:
            start, at = take_varint(chunk, at)
            length, at = take_varint(chunk, at)
            partial += 1
            if partial > MAX_PARTIAL_SEGMENTS:
                raise DeltaError(f"it has more than {MAX_PARTIAL_SEGMENTS} segments that are parts of tensors")
        if which < 2 and i:  # the same tensor once more
            if which == 0:
                raise DeltaError(f"it names all of tensor {tensor} after a part of it")
            start += end
        tensor += which >> 1
        if tensor >= len(layout.tensors):
            raise DeltaError(f"it names tensor {tensor} of {len(layout.tensors)}")
        spec = layout.tensors[tensor]
        end = start + length if length else spec.numel
        if spec.dtype != dtype or not 0 <= start < end <= spec.numel:
            raise DeltaError(
                f"it holds {dtype} [{start}, {end}) of {spec.name!r}, which is {spec.dtype} [{spec.numel}]"
            )
        elements += end - start
        if elements > MAX_CHUNK_ELEMENTS:
            raise DeltaError(f"it covers more than {MAX_CHUNK_ELEMENTS} elements")
        pieces.append(Piece(tensor, start, end))
    return ChunkHead(kind, dtype, tuple(pieces), at)
