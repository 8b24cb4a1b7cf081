"""States of a checkpoint, read in pieces: as it is stored, and as a delta makes it of another state.

Invariant: `pieces` gives the exact bits of what is asked for, however the delta was cut, in arrays of the caller's own. It
holds no more of the model than that, what the stages of a merged file need around it, and one chunk. What a file would
cost in memory and time is known from the heads of its chunks; one that would cost too much is refused before anything is
decoded. Held by tests/unit/deploy/test_delta_states.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from anabranch.deploy.delta_spans import Line, Places, Spans, union
from anabranch.deploy.delta_stages import Stage, naming, read_stages
from anabranch.kernels.delta_chunk import Piece
from anabranch.kernels.delta_codec import TensorChange, decode_chunk
from anabranch.kernels.delta_dtypes import Bits, uint_dtype
from anabranch.kernels.delta_plan import Source, plan_jobs
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.layout import Layout
from anabranch.transport.checkpoint_io import OpenCheckpoint
from anabranch.transport.delta_file import DeltaFile

# A file that was cut as we cut it is read with one job in memory (at most 2^22 elements), and each chunk is decoded once.
# One that was cut in other places costs more: a chunk of the largest size, 2^25 elements, lies over up to 10 jobs and is
# decoded for each of them; and in a file of several stages all of the later chunks over a job are held with it.
_MAX_DECODES = 32  # of a chunk in a pass over the model, on average by what they cost; and so many times the model more
_MAX_HELD = 2**27  # elements, of the model at a time and in one thread: 256 MiB of bf16
_PIECE, _CHUNK = 2**6, 2**16  # what a piece and a chunk cost beyond their elements, as elements


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
    """Disjoint pieces in memory as the codec's `Source`."""

    def __init__(self, layout: Layout, pieces: Sequence[Piece], arrays: Sequence[Bits]) -> None:
        self._starts: dict[str, list[int]] = defaultdict(list)
        self._arrays: dict[str, list[Bits]] = defaultdict(list)
        for piece, array in sorted(zip(pieces, arrays, strict=True), key=lambda held: held[0].start):
            name = layout.tensors[piece.tensor].name
            self._starts[name].append(piece.start)
            self._arrays[name].append(array)

    def read(self, name: str, start: int, stop: int) -> Bits:
        """A view. Raises DeltaError if not all of it is in one piece."""
        at = self._find(name, start, stop)
        if at < 0:
            raise DeltaError(f"a chunk reads elements {start} to {stop} of {name!r}, which are not among its own")
        first = start - self._starts[name][at]
        return self._arrays[name][at][first : first + stop - start]

    def take(self, name: str, start: int, stop: int) -> Bits:
        """As `read`; the array of a piece itself, or a copy of a part."""
        bits = self.read(name, start, stop)
        array = self._arrays[name][self._find(name, start, stop)]
        return array if array.size == bits.size else bits.copy()

    def holds(self, name: str, start: int, stop: int) -> bool:
        """Whether all of it is in one piece."""
        return self._find(name, start, stop) >= 0

    def _find(self, name: str, start: int, stop: int) -> int:
        """The piece that has [start, stop), or −1."""
        at = bisect_right(self._starts.get(name, ()), start) - 1
        return at if at >= 0 and stop <= self._starts[name][at] + self._arrays[name][at].size else -1

    def set(self, change: TensorChange) -> None:
        """Write the part of `change` that falls into the pieces."""
        if change.bits.size == 0 or change.name not in self._starts:
            return
        starts, arrays = self._starts[change.name], self._arrays[change.name]
        begin, end = change.start, change.start + change.bits.size
        if change.indices is not None:
            begin, end = int(change.indices[0]), int(change.indices[-1]) + 1
        for at in range(max(bisect_right(starts, begin) - 1, 0), bisect_right(starts, end - 1)):
            start, array = starts[at], arrays[at]
            if change.indices is not None:
                first, last = np.searchsorted(change.indices, (start, start + array.size))
                array[change.indices[first:last] - start] = change.bits[first:last]
            elif start < end and begin < start + array.size:
                low, high = max(start, begin), min(start + array.size, end)
                array[low - start : high - start] = change.bits[low - begin : high - begin]


class _FirstBase:
    """What the first stage is decoded against: what is held of the state before, and the rest of it as it is asked for."""

    def __init__(self, numbers: Mapping[str, int], held: HeldPieces, before: State) -> None:
        self._numbers = numbers
        self._held = held
        self._before = before

    def read(self, name: str, start: int, stop: int) -> Bits:
        if self._held.holds(name, start, stop):
            return self._held.read(name, start, stop)
        return self._before.pieces([Piece(self._numbers[name], start, stop)])[0]


class DecodedState:
    """The state that `stages`, one after another, make of the state `before`; see `after`."""

    def __init__(self, before: State, stages: Sequence[Stage]) -> None:
        self.layout = before.layout
        self._line = Line(before.layout)
        self._numbers = {t.name: number for number, t in enumerate(before.layout.tensors)}
        self._before = before
        self._stages = stages

    def pieces(self, wanted: Sequence[Piece]) -> list[Bits]:
        needed, chunks = self._plan(wanted)
        read = self._line.pieces(needed)
        held = HeldPieces(self.layout, read, self._before.pieces(read))
        base: Source = _FirstBase(self._numbers, held, self._before)
        for stage, numbers in zip(self._stages, chunks, strict=True):
            for number in numbers.tolist():
                content = stage.content(number)
                with naming(stage.delta, stage.first + number):
                    changes = decode_chunk(self.layout, content, base)
                for change in changes:  # the other chunks of the stage do not see them: they are disjoint
                    held.set(change)
            base = held
        return [held.take(self.layout.tensors[p.tensor].name, p.start, p.stop) for p in wanted]

    def check_cost(self) -> None:
        """Raises DeltaError if reading the state job by job would take too much memory or time."""
        weights = [stage.owned.elements + _PIECE * stage.owned.intervals + _CHUNK for stage in self._stages]
        once = sum(int(weight.sum()) for weight in weights)
        cost, most = 0, _MAX_DECODES * (once + self._line.elements)
        for job in plan_jobs(self.layout):
            needed, chunks = self._plan(job)
            held = needed.elements + _PIECE * len(needed)
            cost += sum(int(weight[numbers].sum()) for weight, numbers in zip(weights, chunks, strict=True))
            if held > _MAX_HELD:
                raise DeltaError(f"its chunks are scattered: {held} elements of the model would be held at a time")
            if cost > most:
                raise DeltaError(f"its chunks are scattered, and would be decoded more than {_MAX_DECODES} times over")

    def _plan(self, wanted: Sequence[Piece]) -> tuple[Spans, list[Places]]:
        """What of the state before is held to make `wanted`, and which chunks of each stage are decoded.

        From the last stage to the second: a sparse chunk needs all of its elements as the stage before leaves them.
        """
        needed = union(self._line.spans(wanted))
        chunks: list[Places] = []
        for stage in reversed(self._stages):
            chunks.append(stage.owned.over(needed))
            if stage is not self._stages[0]:
                needed = union(needed, stage.owned.of(chunks[-1][stage.is_sparse[chunks[-1]]]))
        return needed, chunks[::-1]


def after(deltas: Sequence[DeltaFile], before: State) -> DecodedState:
    """The state that `deltas`, one after another, make of the state `before`, which must have their layout.

    Raises:
        DeltaError: as `read_stages`; chunks that are scattered over the model.
    """
    state = DecodedState(before, read_stages(deltas))
    try:
        state.check_cost()
    except DeltaError as error:
        raise DeltaError(f"{', '.join(str(delta.path) for delta in deltas)}: {error}") from error
    return state
