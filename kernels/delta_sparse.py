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
from anabranch.kernels.delta_bits import PAD_WORDS, PROBLEMS, plan_classes, write_classes
from anabranch.kernels.delta_bits_read import read_classes
from anabranch.kernels.delta_chunk import ChunkHead, ChunkKind, Piece, put_varint, take_varint, write_head
from anabranch.kernels.delta_dtypes import CLASSES, FORMS, Bits
from anabranch.kernels.delta_locate import ClassCursors, locate
from anabranch.kernels.delta_scan import class_counts, ranks
from anabranch.kernels.ordered import take_steps
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.layout import Layout

CUT_AFTER = 20  # times the distance that 9 of 10 changes keep to the one before: a longer run is left out
CUT_SHORTEST = 512  # elements: naming two segments takes some bytes


@dataclass(frozen=True, slots=True)
class Part:
    """A piece with its old and new bits [n] and the indices of its changes (uint32 [k], relative to the piece)."""

    piece: Piece
    old: Bits
    new: Bits
    indices: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Changes:
    """What a sparse chunk says without its base: changes by class (`counts` int64 [256]), grouped by class: unchanged
    elements of the class passed (`gaps` uint32 [k]) and steps in the order of values (`steps` [k], modulo 2^width)."""

    counts: NDArray[np.int64]
    gaps: NDArray[np.uint32]
    steps: Bits


def encode_sparse(layout: Layout, parts: Sequence[Part]) -> bytes:
    """A sparse chunk of `parts`, which all have changes, are of one dtype and in order."""
    parts = [segment for part in parts for segment in _cut(part)]
    changes = group_changes(layout, parts)
    chunk = write_head(layout, ChunkKind.SPARSE, [p.piece for p in parts])
    put_varint(chunk, changes.gaps.size)
    return bytes(chunk) + write_changes(changes)


def _cut(part: Part) -> Iterator[Part]:
    """Segments of `part` without the long unchanged runs: rows whose tokens never occurred, experts that no token
    chose. Every class would need a long gap to pass them, and the decoder would look at them for nothing."""
    indices, size = part.indices, part.piece.size
    longest = max(CUT_SHORTEST, CUT_AFTER * _usual_distance(indices, size))
    if _longest_run(indices, size) <= longest:
        yield part
        return
    edges = np.concatenate([[-1], indices.astype(np.int64), [size]])
    starts, stops = [], []
    for i in np.flatnonzero(np.diff(edges) > longest):  # the unchanged run between edges i and i + 1
        stops.append(int(edges[i]) + 1)
        starts.append(int(edges[i + 1]))
    for start, stop in zip([0, *starts], [*stops, size], strict=True):
        if stop > start:
            first, last = np.searchsorted(indices, [start, stop])
            piece = Piece(part.piece.tensor, part.piece.start + start, part.piece.start + stop)
            yield Part(piece, part.old[start:stop], part.new[start:stop], indices[first:last] - np.uint32(start))


def _usual_distance(indices: NDArray[np.uint32], size: int) -> int:
    """Elements from one change to the next that 9 of 10 do not exceed, by a sample of them."""
    if indices.size < 10:
        return size
    at = np.arange(0, indices.size - 1, max(1, indices.size // 1000))
    distances = np.sort(indices[at + 1] - indices[at])
    return int(distances[distances.size * 9 // 10])


@compiled
def _longest_run(indices: Any, size: Any) -> Any:
    longest, last = 0, -1
    for t in range(indices.size):
        longest = max(longest, indices[t] - last)
        last = int(indices[t])
    return max(longest, size - last) - 1


def group_changes(layout: Layout, parts: Sequence[Part]) -> Changes:
    """The changes of `parts`, grouped by class; every element of every part counts for the ranks."""
    form = FORMS[layout.tensors[parts[0].piece.tensor].dtype]
    total = sum(p.indices.size for p in parts)
    classes, places = np.empty(total, np.uint8), np.empty(total, np.uint32)
    steps = np.empty(total, form.uint)
    seen = class_counts()
    shift, mask = form.uint(form.exponent_shift), form.uint(form.exponent_mask)
    sign = form.uint(form.sign_bit if form.is_float else 0)
    at = 0
    for part in parts:
        here = slice(at, at + part.indices.size)
        ranks(part.old, part.indices, shift, mask, seen, classes[here], places[here])
        take_steps(part.old, part.new, part.indices, sign, steps[here])
        at = here.stop
    counts = np.bincount(classes, minlength=CLASSES).astype(np.int64)
    gaps, grouped = np.empty(total, np.uint32), np.empty(total, form.uint)
    _group(classes, places, steps, np.cumsum(counts) - counts, gaps, grouped)
    return Changes(counts, gaps, grouped)


@compiled
def _group(classes: Any, places: Any, steps: Any, at: Any, gaps: Any, grouped: Any) -> None:
    """Sort stably by class; `at` int64 [256] is where each class begins. The gap is what lies between two ranks."""
    following = np.zeros(CLASSES, np.int64)
    for t in range(classes.size):
        c = classes[t]
        gaps[at[c]] = places[t] - following[c]
        grouped[at[c]] = steps[t]
        following[c] = np.int64(places[t]) + 1
        at[c] += 1


def write_changes(changes: Changes) -> bytes:
    """The bit stream of `changes`."""
    sizes, negative = np.empty_like(changes.steps), np.empty(changes.steps.size, np.uint8)
    _split_steps(changes.steps, changes.steps.dtype.type(1 << (8 * changes.steps.itemsize - 1)), sizes, negative)
    codes = np.zeros((CLASSES, 6), np.int64)
    bits = plan_classes(changes.counts, changes.gaps, sizes, codes)
    words = np.zeros(bits // 64 + 2, np.uint64)
    write_classes(words, changes.counts, changes.gaps, sizes, negative, codes)
    return words.tobytes()[: -(-bits // 8)]


@compiled
def _split_steps(steps: Any, sign: Any, sizes: Any, negative: Any) -> None:
    """|step| − 1 and whether the step is below 0, of steps modulo 2^width."""
    for t in range(steps.size):
        below = (steps[t] & sign) != 0
        negative[t] = below
        sizes[t] = (-steps[t] if below else steps[t]) - 1


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
    cursors = ClassCursors(changes.counts, changes.gaps, changes.steps)
    remaining = changes.gaps.size
    found = []
    for piece in head.pieces:
        indices, bits = locate(read_old(piece), FORMS[head.dtype], cursors, remaining)
        remaining -= indices.size
        if indices.size:
            found.append((piece, indices, bits))
    if remaining:
        raise DeltaError(f"{remaining} of its {changes.gaps.size} changes do not exist in the base weights")
    return found
