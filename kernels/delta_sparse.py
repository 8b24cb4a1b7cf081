"""Sparse chunks: the changes of some pieces, coded by their place among the elements of their class.

Invariant: `decode_sparse` over the same old bits gives exactly the changes that `encode_sparse` was given; over other
bits, or for a damaged chunk, it raises DeltaError or gives changes inside the pieces. It allocates in proportion to the
chunk's own bytes. Equal to kernels/delta_reference.py, held by tests/property/test_delta_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.compiled import compiled
from anabranch.kernels.delta_bits import plan_classes, write_classes
from anabranch.kernels.delta_bits_read import PAD_WORDS, PROBLEMS, read_classes
from anabranch.kernels.delta_chunk import ChunkHead, ChunkKind, Piece, put_varint, take_varint, write_head
from anabranch.kernels.delta_dtypes import CLASSES, FORMS, Bits
from anabranch.kernels.delta_locate import ClassCursors, locate
from anabranch.kernels.delta_scan import ClassCounts, take_changes
from anabranch.kernels.lanes import LANES
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.layout import Layout

CUT_AFTER = (
    48  # changes that a stretch should have had, at the rate around it, to be left out: about what naming it costs
)


@dataclass(frozen=True, slots=True)
class Part:
    """A piece with its old and new bits [n] and what `scan` says of them: the marks of its changes and their number."""

    piece: Piece
    old: Bits
    new: Bits
    words: NDArray[np.uint64]
    changed: int


@dataclass(frozen=True, slots=True)
class Changes:
    """What a sparse chunk says without its base: changes by class (`counts` int64 [256]), grouped by class: unchanged
    elements of the class passed (`gaps` uint32 [k]) and steps in the order of values (`steps` [k], modulo 2^width)."""

    counts: NDArray[np.int64]
    gaps: NDArray[np.uint32]
    steps: Bits


def encode_sparse(layout: Layout, parts: Sequence[Part]) -> bytes:
    """A sparse chunk of `parts`, which all have changes, are of one dtype and in order."""
    parts = [segment for part in parts for segment in cut_segments(part)]
    changes = group_changes(layout, parts)
    chunk = write_head(layout, ChunkKind.SPARSE, [p.piece for p in parts])
    put_varint(chunk, changes.gaps.size)
    return bytes(chunk) + write_changes(changes)


def cut_segments(part: Part) -> Iterator[Part]:
    """Segments of `part` without the long unchanged runs: rows whose tokens never occurred, experts that no token
    chose. Every class would need a long gap to pass them, and the decoder would look at them for nothing."""
    changed_blocks, longest = _runs(part.words)
    rate = _rate(part.changed / changed_blocks)
    if rate * longest <= CUT_AFTER:
        yield part
        return
    edges = np.concatenate([[-1], np.flatnonzero(part.words), [part.words.size]])
    cuts = np.flatnonzero(rate * (np.diff(edges) - 1) > CUT_AFTER)  # run i lies between edges i and i + 1
    starts, stops = [0, *edges[cuts + 1].tolist()], [*(edges[cuts] + 1).tolist(), part.words.size]
    for start, stop in zip(starts, stops, strict=True):
        if stop > start:
            a, b = start * LANES, min(stop * LANES, part.piece.size)
            piece = Piece(part.piece.tensor, part.piece.start + a, part.piece.start + b)
            words = part.words[start:stop]
            yield Part(piece, part.old[a:b], part.new[a:b], words, int(np.bitwise_count(words).sum()))


@compiled
def _runs(words: Any) -> Any:
    """How many words are not 0, and the longest run of zeros."""
    filled, longest, run = 0, 0, 0
    for i in range(words.size):
        run = 0 if words[i] else run + 1
        filled += words[i] != 0
        longest = max(longest, run)
    return filled, longest


@compiled
def _rate(mean: Any) -> Any:
    """Changes per block, given their mean over the blocks that have any: what lies elsewhere does not count. The rate r
    of a Poisson number whose mean, when it is not 0, is r / (1 − exp(−r))."""
    rate = mean
    for _ in range(100):
        rate = mean * (1 - np.exp(-rate))
    return rate


def group_changes(layout: Layout, parts: Sequence[Part]) -> Changes:
    """The changes of `parts`, grouped by class; every element of every part counts for the gaps."""
    form = FORMS[layout.tensors[parts[0].piece.tensor].dtype]
    total = sum(p.changed for p in parts)
    classes, gaps, steps = np.empty(total, np.uint8), np.empty(total, np.uint32), np.empty(total, form.uint)
    seen = ClassCounts()
    at = 0
    for part in parts:
        here = slice(at, at + part.changed)
        take_changes(part.old, part.new, part.words, form, seen, (classes[here], gaps[here], steps[here]))
        at = here.stop
    grouped = Changes(seen.changed, np.empty_like(gaps), np.empty_like(steps))
    _group(classes, gaps, steps, np.cumsum(seen.changed) - seen.changed, grouped.gaps, grouped.steps)
    return grouped


@compiled
def _group(classes: Any, gaps: Any, steps: Any, at: Any, out_gaps: Any, out_steps: Any) -> None:
    """Sort stably by class; `at` int64 [256] is where each class begins."""
    for t in range(classes.size):
        to = at[classes[t]]
        out_gaps[to] = gaps[t]
        out_steps[to] = steps[t]
        at[classes[t]] = to + 1


def write_changes(changes: Changes) -> bytes:
    """The bit stream of `changes`."""
    sizes = np.empty_like(changes.steps)
    _sizes_of(changes.steps, changes.steps.dtype.type(1 << (8 * changes.steps.itemsize - 1)), sizes)
    codes = np.zeros((CLASSES, 6), np.int64)
    room = plan_classes(changes.counts, changes.gaps, sizes, codes)
    words = np.zeros(room // 64 + 2, np.uint64)
    bits = write_classes(words, changes.counts, changes.gaps, changes.steps, sizes, codes)
    return words.view(np.uint8)[: -(-bits // 8)].tobytes()


@compiled
def _sizes_of(steps: Any, sign: Any, sizes: Any) -> None:
    """|step| − 1 of steps modulo 2^width."""
    for t in range(steps.size):
        sizes[t] = (-steps[t] if steps[t] & sign else steps[t]) - 1


def read_changes(head: ChunkHead, chunk: bytes) -> Changes:
    """Inverse of `write_changes`, for the body of `chunk`. Raises DeltaError."""
    form = FORMS[head.dtype]
    total, at = take_varint(chunk, head.body_at)
    stream = np.frombuffer(chunk, np.uint8)[at:]
    if not 1 <= total <= min(head.elements, 8 * stream.size):  # every change takes a bit at least
        raise DeltaError(f"it announces {total} changes of {head.elements} elements in {stream.size} bytes")
    words = np.zeros(stream.size // 8 + 1 + PAD_WORDS, np.uint64)
    words.view(np.uint8)[: stream.size] = stream
    counts, gaps, steps = np.zeros(CLASSES, np.int64), np.empty(total, np.uint32), np.empty(total, form.uint)
    largest = np.uint64(form.sign_bit)
    bits = read_classes(words, 8 * stream.size, head.elements, form.exponent_mask, largest, counts, gaps, steps)
    if bits < 0:
        raise DeltaError(PROBLEMS[bits])
    if -(-bits // 8) != stream.size or (bits % 8 and stream[-1] >> (bits % 8)):
        raise DeltaError(f"its bit stream has {8 * stream.size - bits} bits left over")
    return Changes(counts, gaps, steps)


def decode_sparse(
    head: ChunkHead, chunk: bytes, read_old: Callable[[Piece], Bits]
) -> list[tuple[Piece, NDArray[np.uint32], Bits]]:
    """For every piece with changes: their indices in it (uint32 [k], ascending) and new bits [k]. Raises DeltaError."""
    changes = read_changes(head, chunk)
    cursors = ClassCursors(FORMS[head.dtype], changes.counts, changes.gaps, changes.steps, head.elements)
    remaining = changes.gaps.size
    found = []
    for piece in head.pieces:
        indices, bits = locate(read_old(piece), cursors, remaining)
        remaining -= indices.size
        if indices.size:
            found.append((piece, indices, bits))
    if remaining:
        raise DeltaError(f"{remaining} of its {changes.gaps.size} changes do not exist in the base weights")
    return found
