"""A chunk of a weight delta, byte by byte and bit by bit, with the meaning of each: the example of docs/delta-format.md.

Invariant: what it prints is what kernels/delta_reference.py reads, in the order in which it reads it. Held by
tests/test_docs.py, which compares the page with this program's output.
"""

from __future__ import annotations

from anabranch.kernels import delta_reference
from anabranch.kernels.delta_chunk import ChunkHead, ChunkKind, read_head, take_varint
from anabranch.kernels.delta_dtypes import FORMS
from anabranch.schemas.layout import Layout


def rows(layout: Layout, chunk: bytes) -> list[str]:
    """Lines "offset  bytes  meaning"; for a bit stream "bit  bits, in the order they are read  meaning"."""
    head = read_head(layout, chunk)
    out = [_row(0, chunk[:1], f"kind {head.kind.value}, {head.kind.name.lower()}; dtype {chunk[0] & 15}, {head.dtype}")]
    out += _segments(layout, head, chunk)
    if head.kind == ChunkKind.RAW:
        width = FORMS[head.dtype].width_bytes
        for i in range(head.elements):
            start = head.body_at + i * width
            out.append(_row(start, chunk[start : start + width], f"element {i}"))
    elif head.kind == ChunkKind.SPARSE:
        total, at = take_varint(chunk, head.body_at)
        out.append(_row(head.body_at, chunk[head.body_at : at], f"{total} change{'s' * (total > 1)}"))
        out.append(_row(at, chunk[at : at + 8], "the bit stream" + (", which goes on" if len(chunk) > at + 8 else "")))
        for start in range(at + 8, len(chunk), 8):
            out.append(_row(start, chunk[start : start + 8], ""))
        out += _stream(chunk[at:], total)
    return out


def _segments(layout: Layout, head: ChunkHead, chunk: bytes) -> list[str]:
    out = [_row(1, chunk[1:2], f"{len(head.pieces)} segment{'s' * (len(head.pieces) > 1)}")]
    at = 2
    for piece in head.pieces:
        which, end = take_varint(chunk, at)
        if which & 1:
            _, end = take_varint(chunk, end)
            _, end = take_varint(chunk, end)
        spec = layout.tensors[piece.tensor]
        what = "all" if piece.size == spec.numel else f"[{piece.start}, {piece.stop})"
        out.append(_row(at, chunk[at:end], f"{what} of tensor {piece.tensor}, {spec.name}"))
        at = end
    return out


def _stream(stream: bytes, total: int) -> list[str]:
    reader = _Tracer(stream)
    c, seen = -1, 0
    while seen < total:
        c += 1 + reader.traced(reader.exp_golomb, 0, lambda x, before=c: f"class {before} + 1 + {x}")
        count = 1 + reader.traced(reader.exp_golomb, delta_reference.COUNT_ORDER, lambda x: f"1 + {x} changes")
        gaps = reader.traced(reader.numbers, count, lambda x: f"gaps: {_words(x)}")
        reader.traced(reader.numbers, count, lambda x: f"|step| - 1: {_words(x)}")
        reader.traced(lambda n: [reader.field(1) for _ in range(n)], count, lambda x: f"negative: {_words(x)}")
        seen += len(gaps)
    if len(reader.bits) > reader.at:
        reader.traced(reader.field, len(reader.bits) - reader.at, lambda _: "unused")
    return reader.lines


class _Tracer(delta_reference.BitReader):
    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.lines: list[str] = []

    def traced(self, read, argument, meaning):  # type: ignore[no-untyped-def]
        start = self.at
        value = read(argument)
        bits = "".join(map(str, self.bits[start : self.at]))
        self.lines.append(f"  bit {start:3d}  {bits:<22} {meaning(value)}")
        return value


def _words(values: list[int]) -> str:
    return " ".join(map(str, values))


def _row(at: int, data: bytes, meaning: str) -> str:
    return f"{at:4d}  {data.hex(' '):<24} {meaning}".rstrip()
