"""States of a checkpoint, read in pieces: as it is stored, and as a delta makes it of another state.

Invariant: `pieces` gives the exact bits of what is asked for, in arrays of the caller's own, and holds no more of the model
than that and the chunks over it. Before anything is decoded every chunk's digest has been checked, and that chunks are
disjoint and cut so that a pass over the model decodes none of them many times over: the time that a file can cost is
bounded by the size of the model. Held by tests/unit/deploy/test_delta_states.py.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from anabranch.deploy.delta_progress import progress
from anabranch.kernels.delta_chunk import ChunkKind, Piece, read_head
from anabranch.kernels.delta_codec import CODEC, TensorChange, decode_chunk, plan_jobs
from anabranch.kernels.delta_dtypes import Bits, uint_dtype
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.layout import Layout
from anabranch.transport.checkpoint_io import OpenCheckpoint
from anabranch.transport.delta_file import DeltaFile

_MAX_DECODES = 64  # of one chunk in a pass over the model; 1 when the file was cut into jobs as we cut them


class State(Protocol):
    """All tensors of `layout` at one moment of training. `pieces` may be called from several threads."""

    @property
    def layout(self) -> Layout: ...

    def pieces(self, wanted: Sequence[Piece]) -> list[Bits]:
        """The elements of each piece, 1-D unsigned integers of the dtype's width, for the caller to keep and change."""
        ...


class StoredState:
    """The state that a checkpoint on disk holds."""

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        self.layout = checkpoint.layout
        self._checkpoint = checkpoint

    def pieces(self, wanted: Sequence[Piece]) -> list[Bits]:
        names = self.layout.tensors
        return [self._checkpoint.read(names[p.tensor].name, p.start, p.stop) for p in wanted]


class AbsentState:
    """What an anchor is decoded over: nothing. It reads as zeros, every one of which the anchor sets."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def pieces(self, wanted: Sequence[Piece]) -> list[Bits]:
        specs = self.layout.tensors
        return [np.zeros(p.stop - p.start, uint_dtype(specs[p.tensor].dtype)) for p in wanted]


class HeldPieces:
    """Pieces in memory as the codec's `Source`."""

    def __init__(self, layout: Layout, pieces: Sequence[Piece], arrays: Sequence[Bits]) -> None:
        self._held: dict[str, list[tuple[Piece, Bits]]] = defaultdict(list)
        for piece, array in zip(pieces, arrays, strict=True):
            self._held[layout.tensors[piece.tensor].name].append((piece, array))

    def read(self, name: str, start: int, stop: int) -> Bits:
        for piece, array in self._held.get(name, ()):
            if piece.start <= start and stop <= piece.stop:
                return array[start - piece.start : stop - piece.start]
        raise DeltaError(f"a chunk reads elements {start} to {stop} of {name!r}, which are not among its own")


class DecodedState:
    """The state that one stage of `delta` makes of the state `before`; see `after`.

    `pieces_of` maps each chunk of the stage to its pieces, in an order that `_spans` gives.
    """

    def __init__(self, delta: DeltaFile, pieces_of: dict[int, tuple[Piece, ...]], before: State) -> None:
        self.layout = delta.header.layout
        self._delta = delta
        self._before = before
        self._pieces_of = pieces_of
        self._spans = _spans(self.layout, pieces_of)
        self._starts = [(piece.tensor, piece.start) for piece, _ in self._spans]

    def pieces(self, wanted: Sequence[Piece]) -> list[Bits]:
        arrays = self._before.pieces(wanted)
        changes: list[TensorChange] = []
        for number in self._chunks_over(wanted):
            base = self._base_of(number, wanted, arrays)
            changes += decode_chunk(self.layout, self._delta.chunk(number), base)
        _set(self.layout, wanted, arrays, changes)  # only now: the arrays are the base until all chunks are decoded
        return arrays

    def _chunks_over(self, wanted: Sequence[Piece]) -> list[int]:
        """The chunks that hold elements of `wanted`, ascending."""
        found: set[int] = set()
        for piece in wanted:
            at = max(bisect_right(self._starts, (piece.tensor, piece.start)) - 1, 0)
            while at < len(self._spans) and self._starts[at] < (piece.tensor, piece.stop):
                span, number = self._spans[at]
                if span.tensor == piece.tensor and span.stop > piece.start:
                    found.add(number)
                at += 1
        return sorted(found)

    def _base_of(self, number: int, wanted: Sequence[Piece], arrays: Sequence[Bits]) -> HeldPieces:
        """What the chunk is decoded against; read once if the file was cut into jobs as we cut it."""
        own = self._pieces_of[number]
        if set(own) <= set(wanted):
            return HeldPieces(self.layout, wanted, arrays)
        return HeldPieces(self.layout, own, self._before.pieces(own))


def after(delta: DeltaFile, before: State) -> State:
    """The state that all stages of `delta` make of `before`.

    Raises:
        DeltaError: another codec; a damaged chunk; chunks that overlap, or are scattered over the model.
    """
    if delta.header.manifest.codec != CODEC:
        raise DeltaError(f"{delta.path} has codec {delta.header.manifest.codec}; this program knows {CODEC}")
    jobs = sorted(((p, n) for n, job in enumerate(plan_jobs(delta.header.layout)) for p in job), key=_place)
    state, times = before, 1
    with progress(f"reading {delta.path.name}", delta.header.manifest.payload_bytes) as advance:
        for stage in range(len(delta.header.stages)):
            pieces_of: dict[int, tuple[Piece, ...]] = {}
            for number in delta.stage(stage):
                chunk = delta.chunk(number)
                pieces_of[number] = _pieces(delta, number, chunk)
                advance(len(chunk))
            state = DecodedState(delta, pieces_of, state)
            times *= max((_jobs_over(pieces, jobs) for pieces in pieces_of.values()), default=1)
            if times > _MAX_DECODES:
                raise DeltaError(f"{delta.path} is cut into chunks that would be decoded {times} times")
    return state


def _pieces(delta: DeltaFile, number: int, chunk: bytes) -> tuple[Piece, ...]:
    try:
        head = read_head(delta.header.layout, chunk)
    except DeltaError as error:
        raise DeltaError(f"{delta.path}: chunk {number}: {error}") from error
    if head.kind is ChunkKind.SPARSE and delta.header.manifest.kind == "anchor":
        raise DeltaError(f"{delta.path}: chunk {number} of an anchor holds changes, which need a base")
    return head.pieces


def _jobs_over(pieces: Sequence[Piece], jobs: list[tuple[Piece, int]]) -> int:
    """How many of our jobs hold elements of `pieces`; `jobs` has their pieces, sorted."""
    found: set[int] = set()
    for piece in pieces:
        first = bisect_right(jobs, (piece.tensor, piece.start), key=_place) - 1
        last = bisect_left(jobs, (piece.tensor, piece.stop), key=_place)
        found.update(number for _, number in jobs[first:last])
    return len(found)


def _place(span: tuple[Piece, int]) -> tuple[int, int]:
    return span[0].tensor, span[0].start


def _spans(layout: Layout, pieces_of: dict[int, tuple[Piece, ...]]) -> list[tuple[Piece, int]]:
    """Every piece with its chunk, in the order of the layout. Raises DeltaError if two overlap."""
    spans = sorted(((piece, number) for number, pieces in pieces_of.items() for piece in pieces), key=_place)
    for (a, first), (b, second) in pairwise(spans):
        if a.tensor == b.tensor and a.stop > b.start:
            raise DeltaError(f"chunks {first} and {second} both hold elements of {layout.tensors[a.tensor].name!r}")
    return spans


def _set(layout: Layout, wanted: Sequence[Piece], arrays: Sequence[Bits], changes: Sequence[TensorChange]) -> None:
    """Write the part of `changes` that falls into the pieces `wanted` to their `arrays`."""
    targets: dict[str, list[tuple[Piece, Bits]]] = defaultdict(list)
    for piece, array in zip(wanted, arrays, strict=True):
        targets[layout.tensors[piece.tensor].name].append((piece, array))
    for change in changes:
        for piece, array in targets.get(change.name, ()):
            if change.indices is None:
                start, stop = max(piece.start, change.start), min(piece.stop, change.start + change.bits.size)
                if start < stop:
                    array[start - piece.start : stop - piece.start] = change.bits[
                        start - change.start : stop - change.start
                    ]
            else:
                first, last = np.searchsorted(change.indices, (piece.start, piece.stop))
                array[change.indices[first:last] - piece.start] = change.bits[first:last]
