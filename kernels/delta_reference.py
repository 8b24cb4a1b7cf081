"""The format of a sparse chunk, `class-golomb/1`, in the fewest lines: what the fast kernels are held to.

Invariant: `encode_sparse` and `decode_sparse` here and in kernels/delta_sparse.py give the same bytes and the same
changes for every input. Written to be read beside docs/delta-format.md: numbers are Python integers, a bit stream is a
list of bits. Held by tests/property/test_delta_kernels.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from anabranch.kernels.delta_chunk import ChunkHead, ChunkKind, Piece, put_varint, take_varint, write_head
from anabranch.kernels.delta_dtypes import FORMS, BitForm, Bits, from_ordered, to_ordered
from anabranch.schemas.layout import Layout

UNARY_LIMIT, COUNT_ORDER, CODE_BITS = 20, 8, 7
PARAMETERS = [1, 2, 3] + [(4 + i % 4) << i // 4 for i in range(2**CODE_BITS - 5)]  # 1 2 3 4 5 6 7 8 10 12 14 16 ...


def classes_of(bits: Bits, form: BitForm) -> Bits:
    classes: Bits = (bits >> form.uint(form.exponent_shift)) & form.uint(form.exponent_mask)
    return classes


class BitWriter:
    def __init__(self) -> None:
        self.bits: list[int] = []

    def field(self, x: int, width: int) -> None:
        """The low `width` bits of `x`, lowest first."""
        self.bits += [x >> i & 1 for i in range(width)]

    def exp_golomb(self, x: int, order: int) -> None:
        y = (x >> order) + 1
        n = y.bit_length() - 1
        self.bits += [1] * n + [0]
        self.field(y, n)
        self.field(x, order)

    def golomb(self, x: int, m: int) -> None:
        """Quotient in unary (from 20 ones on escaped), remainder in truncated binary (Golomb 1966)."""
        q, r = divmod(x, m)
        self.bits += [1] * min(q, UNARY_LIMIT)
        if q < UNARY_LIMIT:
            self.bits.append(0)
        else:
            self.exp_golomb(q - UNARY_LIMIT, 0)
        width = (m - 1).bit_length()
        short = 2**width - m  # so many remainders take a bit less
        if width and r < short:
            self.field(r, width - 1)
        elif width:
            self.field((r + short) >> 1, width - 1)
            self.field(r + short, 1)

    def numbers(self, values: Sequence[int]) -> None:
        zeros = values.count(0)
        if zeros == len(values):
            self.field(0, CODE_BITS)
            return
        plain = BitWriter()
        code = best_code(sum(values) / len(values))
        plain.field(code, CODE_BITS)
        for x in values:
            plain.golomb(x, PARAMETERS[code - 2])
        cost = len(plain.bits)
        if code == 2:  # parameter 1: reckoned without escapes
            cost = CODE_BITS + len(values) + min(sum(values), len(values) * (UNARY_LIMIT + 128))
        runs = _zero_runs(values, zeros) if 2 * zeros >= len(values) else plain
        self.bits += runs.bits if len(runs.bits) < cost else plain.bits

    def tobytes(self) -> bytes:
        return np.packbits(np.array(self.bits, np.uint8), bitorder="little").tobytes()


def best_code(mean: float) -> int:
    """The code whose parameter is nearest to ln 2 · (mean + ½), which is best for geometric numbers."""
    target = math.log(2) * (mean + 0.5)
    steps = enumerate(itertools.pairwise(PARAMETERS))
    return 2 + next((i for i, (a, b) in steps if a + b >= 2 * target), len(PARAMETERS) - 1)


def _zero_runs(values: Sequence[int], zeros: int) -> BitWriter:
    out = BitWriter()
    others = len(values) - zeros
    run_code, other_code = best_code(zeros / (others + 1)), best_code((sum(values) - others) / others)
    for code in (1, run_code, other_code):
        out.field(code, CODE_BITS)
    run = 0
    for x in values:
        if x == 0:
            run += 1
        else:
            out.golomb(run, PARAMETERS[run_code - 2])
            out.golomb(x - 1, PARAMETERS[other_code - 2])
            run = 0
    if run:
        out.golomb(run, PARAMETERS[run_code - 2])
    return out


def encode_sparse(layout: Layout, pieces: Sequence[Piece], old: Sequence[Bits], new: Sequence[Bits]) -> bytes:
    """A sparse chunk whose segments are `pieces`, given their old and new bits."""
    form = FORMS[layout.tensors[pieces[0].tensor].dtype]
    a, b = np.concatenate(old), np.concatenate(new)
    steps = (to_ordered(b, form) - to_ordered(a, form)).astype(np.int64 if form.width_bytes < 8 else object)
    half, full = form.sign_bit, 2 * form.sign_bit
    head = write_head(layout, ChunkKind.SPARSE, pieces)
    put_varint(head, int((a != b).sum()))
    out = BitWriter()
    previous = -1
    for c in sorted(set(classes_of(a, form)[a != b].tolist())):
        members = np.flatnonzero(classes_of(a, form) == c)
        ranks = np.flatnonzero((a != b)[members])
        signed = [(int(s) + half) % full - half for s in steps[members[ranks]]]
        out.exp_golomb(c - previous - 1, 0)
        out.exp_golomb(len(ranks) - 1, COUNT_ORDER)
        out.numbers((np.diff(ranks, prepend=-1) - 1).tolist())
        out.numbers([abs(s) - 1 for s in signed])
        out.bits += [int(s < 0) for s in signed]
        previous = c
    return bytes(head) + out.tobytes()


class BitReader:
    def __init__(self, data: bytes) -> None:
        self.bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").tolist()
        self.at = 0

    def field(self, width: int) -> int:
        self.at += width
        return sum(bit << i for i, bit in enumerate(self.bits[self.at - width : self.at]))

    def ones(self, limit: int) -> int:
        """How many ones come next; a zero ends them, except at `limit`."""
        n = 0
        while n < limit and self.field(1):
            n += 1
        return n

    def exp_golomb(self, order: int) -> int:
        n = self.ones(64)
        y = self.field(n) | 1 << n
        return (y - 1 << order) | self.field(order)

    def golomb(self, m: int) -> int:
        q = self.ones(UNARY_LIMIT)
        if q == UNARY_LIMIT:
            q += self.exp_golomb(0)
        width = (m - 1).bit_length()
        short = 2**width - m
        r = self.field(width - 1) if width else 0
        if width and r >= short:
            r = (r << 1 | self.field(1)) - short
        return q * m + r

    def numbers(self, count: int) -> list[int]:
        code = self.field(CODE_BITS)
        if code == 0:
            return [0] * count
        if code >= 2:
            return [self.golomb(PARAMETERS[code - 2]) for _ in range(count)]
        run_m, other_m = (PARAMETERS[self.field(CODE_BITS) - 2] for _ in range(2))
        values: list[int] = []
        while len(values) < count:
            values += [0] * self.golomb(run_m)
            if len(values) < count:
                values.append(self.golomb(other_m) + 1)
        return values


def decode_sparse(head: ChunkHead, chunk: bytes, old: Sequence[Bits]) -> list[tuple[Piece, list[int], Bits]]:
    """For every piece with changes: their indices in it and new bits, given the old bits of all pieces."""
    form = FORMS[head.dtype]
    a = np.concatenate(old)
    total, at = take_varint(chunk, head.body_at)
    stream = BitReader(chunk[at:])
    new = a.copy()
    c, seen = -1, 0
    while seen < total:
        c += 1 + stream.exp_golomb(0)
        count = 1 + stream.exp_golomb(COUNT_ORDER)
        gaps, sizes = stream.numbers(count), stream.numbers(count)
        negative = [stream.field(1) for _ in range(count)]
        members = np.flatnonzero(classes_of(a, form) == c)
        places = members[np.cumsum(np.array(gaps) + 1) - 1]
        steps = np.array([-(s + 1) if n else s + 1 for s, n in zip(sizes, negative, strict=True)], object)
        moved = (to_ordered(a[places], form).astype(object) + steps) % (2 * form.sign_bit)
        new[places] = from_ordered(moved.astype(form.uint), form)
        seen += count
    found, start = [], 0
    for piece in head.pieces:
        here = slice(start, start + piece.size)
        indices = np.flatnonzero(new[here] != a[here])
        if indices.size:
            found.append((piece, indices.tolist(), new[here][indices]))
        start = here.stop
    return found
