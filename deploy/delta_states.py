"""States of a checkpoint, read in pieces: as it is stored, and as a delta makes it of another state.

Invariant: `pieces` gives the exact bits of what is asked for, in arrays of the caller's own, and holds no more of the model
than that and the chunks over it. Before anything is decoded every chunk's digest has been checked, and that chunks are
disjoint and cut so that a pass over the model decodes none of them many times over: the time that a file can cost is
bounded by the size of the model. Held by tests/unit/deploy/test_delta_states.py.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from anabranch.deploy.delta_progress import progress
from anabranch.kernels.delta_chunk import ChunkKind, Piece, read_head
from anabranch.kernels.delta_codec import CODEC, TensorChange, decode_chunk
from anabranch.kernels.delta_dtypes import Bits, uint_dtype
from anabranch.kernels.delta_plan import plan_jobs
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.layout import Layout
from anabranch.transport.checkpoint_io import OpenCheckpoint
from anabranch.transport.delta_file import DeltaFile

# Of one chunk in a pass over the model. It is 1 when the file was cut as we cut it, and at most 9 for chunks of the
# largest size that the format knows.
_MAX_DECODES = 16


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
        self._layout = layout
        self._held: dict[str, list[tuple[Piece, Bits]]] = defaultdict(list)
        for piece, array in zip(pieces, arrays, strict=True):
            self._held[layout.tensors[piece.tensor].name].append((piece, array))

    def holds(self, wanted: Piece) -> bool:
        held = self._held.get(self._layout.tensors[wanted.tensor].name, ())
        return any(piece.start <= wanted.start and wanted.stop <= piece.stop for piece, _ in held)

    def read(self, name: str, start: int, stop: int) -> Bits:
        for piece, array in self._held.get(name, ()):
            if piece.start <= start and stop <= piece.stop:
                return array[start - piece.start : stop - piece.start]
        raise DeltaError(f"a chunk reads elements {start} to {stop} of {name!r}, which are not among its own")

    def set(self, changes: Iterable[TensorChange]) -> None:
        """Write the part of `changes` that falls into the pieces."""
        for change in changes:
            for piece, array in self._held.get(change.name, ()):
                if change.indices is None:
                    start, stop = max(piece.start, change.start), min(piece.stop, change.start + change.bits.size)
                    if start < stop:
                        new = change.bits[start - change.start : stop - change.start]
                        array[start - piece.start : stop - piece.start] = new
                else:
                    first, last = np.searchsorted(change.indices, (piece.start, piece.stop))
                    array[change.indices[first:last] - piece.start] = change.bits[first:last]


class Spans:
    """Which chunk, or job, holds which elements; no two hold the same.

    Raises:
        DeltaError: two do.
    """

    def __init__(self, layout: Layout, pieces_of: Mapping[int, Sequence[Piece]]) -> None:
        spans = [(piece, number) for number, pieces in pieces_of.items() for piece in pieces]
        self._spans = sorted(spans, key=lambda span: (span[0].tensor, span[0].start))
        self._starts = [(piece.tensor, piece.start) for piece, _ in self._spans]
        for (a, first), (b, second) in pairwise(self._spans):
            if a.tensor == b.tensor and a.stop > b.start:
                name = layout.tensors[a.tensor].name
                raise DeltaError(f"chunks {first} and {second} both hold elements of {name!r}")

    def over(self, wanted: Iterable[Piece]) -> list[int]:
        """The numbers that hold elements of `wanted`, ascending."""
        found: set[int] = set()
        for piece in wanted:
            first = max(bisect_right(self._starts, (piece.tensor, piece.start)) - 1, 0)
            last = bisect_left(self._starts, (piece.tensor, piece.stop))
            found.update(
                number
                for span, number in self._spans[first:last]
                if span.tensor == piece.tensor and span.stop > piece.start
            )
        return sorted(found)


@dataclass(frozen=True)
class Stage:
    """One stage of a delta file: its chunks, and the pieces that each of them holds."""

    delta: DeltaFile
    pieces_of: dict[int, tuple[Piece, ...]]
    spans: Spans


class DecodedState:
    """The state that `stages`, one after another, make of the state `before`; see `after`."""

    def __init__(self, before: State, stages: Sequence[Stage]) -> None:
        self.layout = before.layout
        self._before = before
        self._stages = stages
        self._jobs = plan_jobs(self.layout)
        self._job_spans = Spans(self.layout, dict(enumerate(self._jobs)))

    def pieces(self, wanted: Sequence[Piece]) -> list[Bits]:
        return self._after(len(self._stages), wanted)

    def _after(self, stages: int, wanted: Sequence[Piece]) -> list[Bits]:
        """`wanted` after the first `stages` stages."""
        arrays = self._before.pieces(wanted)
        held = HeldPieces(self.layout, wanted, arrays)
        for number, stage in enumerate(self._stages[:stages]):
            changes: list[TensorChange] = []
            for chunk in stage.spans.over(wanted):
                own = stage.pieces_of[chunk]
                base = held if all(map(held.holds, own)) else self._base_of(own, number)
                content = stage.delta.chunk(chunk)
                with naming(stage.delta, chunk):
                    changes += decode_chunk(self.layout, content, base)
            held.set(changes)  # only now: until all chunks of the stage are decoded this is their base
        return arrays

    def _base_of(self, own: Sequence[Piece], stages: int) -> HeldPieces:
        """What a chunk with the pieces `own` is decoded against when it was not cut as our jobs are: whole jobs, so that
        a chunk of an earlier stage that was cut as they are is decoded once for each."""
        whole = [piece for job in self._job_spans.over(own) for piece in self._jobs[job]]
        return HeldPieces(self.layout, whole, self._after(stages, whole))

    def decodes(self) -> int:
        """How often a chunk is decoded, at most, when the state is read job by job; stages multiply it."""
        times = 1
        for stage in self._stages:
            times *= max(len(self._job_spans.over(pieces)) for pieces in stage.pieces_of.values())
        return times


def after(deltas: Sequence[DeltaFile], before: State) -> DecodedState:
    """The state that `deltas`, one after another, make of the state `before`, which must have their layout.

    Raises:
        DeltaError: another codec; a damaged chunk; chunks that overlap, or are scattered over the model.
    """
    stages = []
    for delta in deltas:
        if delta.header.manifest.codec != CODEC:
            raise DeltaError(f"{delta.path} has codec {delta.header.manifest.codec}; this program knows {CODEC}")
        with progress(f"reading {delta.path.name}", delta.header.manifest.payload_bytes) as advance:
            for numbers in map(delta.stage, range(len(delta.header.stages))):
                pieces_of: dict[int, tuple[Piece, ...]] = {}
                for number in numbers:
                    chunk = delta.chunk(number)
                    pieces_of[number] = _pieces(delta, number, chunk)
                    advance(len(chunk))
                if pieces_of:
                    stages.append(Stage(delta, pieces_of, Spans(before.layout, pieces_of)))
    state = DecodedState(before, stages)
    if (times := state.decodes()) > _MAX_DECODES:
        raise DeltaError(f"{deltas[-1].path}: its chunks are scattered, and would be decoded {times} times")
    return state


@contextmanager
def naming(delta: DeltaFile, chunk: int) -> Iterator[None]:
    """A DeltaError in the block says which chunk of which file it is about."""
    try:
        yield
    except DeltaError as error:
        raise DeltaError(f"{delta.path}: chunk {chunk}: {error}") from error


def _pieces(delta: DeltaFile, number: int, chunk: bytes) -> tuple[Piece, ...]:
    with naming(delta, number):
        head = read_head(delta.header.layout, chunk)
        if head.kind is ChunkKind.SPARSE and delta.header.manifest.kind == "anchor":
            raise DeltaError("it holds changes, and an anchor has no base for them")
        return head.pieces
