"""Sets of a model's elements, as intervals of all its tensors put one after another.

Invariant: a `Spans` is ascending, disjoint and in 16 bytes an interval, however many there are; `Line` turns pieces of
tensors into spans and spans into pieces without losing or adding an element. Held by
tests/unit/deploy/test_delta_spans.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.delta_chunk import Piece
from anabranch.schemas.layout import Layout

Places = NDArray[np.int64]
_NONE: Places = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Spans:
    """The elements [starts[i], stops[i]) of a line, for every i; both int64 [n], ascending."""

    starts: Places
    stops: Places

    @property
    def elements(self) -> int:
        return int((self.stops - self.starts).sum())

    def __len__(self) -> int:
        return self.starts.size


def union(*sets: Spans) -> Spans:
    """The elements of all `sets`, which may overlap, in as few intervals as possible."""
    starts, stops = (np.concatenate([_NONE, *parts]) for parts in ([s.starts for s in sets], [s.stops for s in sets]))
    if starts.size == 0:
        return Spans(starts, stops)
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], np.maximum.accumulate(stops[order])
    apart = np.flatnonzero(starts[1:] > stops[:-1])  # intervals that touch become one
    return Spans(starts[np.append(0, apart + 1)], stops[np.append(apart, starts.size - 1)])


class Line:
    """Where the tensors of `layout` lie when they are put one after another, as elements."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._begins = np.cumsum([0, *(t.numel for t in layout.tensors)])  # of each tensor, and the end of the last

    @property
    def elements(self) -> int:
        return int(self._begins[-1])

    def spans(self, pieces: Sequence[Piece]) -> Spans:
        """Of `pieces`, which are disjoint and in the order of tensors and elements; one interval each."""
        triples: Any = np.fromiter(((p.tensor, p.start, p.stop) for p in pieces), np.dtype((np.int64, 3)), len(pieces))
        begins = self._begins[triples[:, 0]]
        return Spans(begins + triples[:, 1], begins + triples[:, 2])

    def pieces(self, spans: Spans) -> list[Piece]:
        """The same elements as pieces of tensors, in order, cut only where a tensor ends."""
        found: list[Piece] = []
        tensors = np.searchsorted(self._begins, spans.starts, "right") - 1
        for tensor, start, stop in zip(tensors.tolist(), spans.starts.tolist(), spans.stops.tolist(), strict=True):
            while start < stop:
                begin, end = int(self._begins[tensor]), min(stop, int(self._begins[tensor + 1]))
                if start < end:
                    found.append(Piece(tensor, start - begin, end - begin))
                start, tensor = end, tensor + 1
        return found

    def name(self, place: int) -> str:
        """Of the tensor that holds the element at `place`."""
        return self.layout.tensors[int(np.searchsorted(self._begins, place, "right")) - 1].name


class OwnedSpans:
    """Which of several owners, 0 to n − 1, has which elements of a line."""

    def __init__(self, owned: Iterable[Spans]) -> None:
        each = list(owned)
        self._ends = np.cumsum([0, *map(len, each)])  # of each owner's intervals in `_all`
        self._all = Spans(
            *(np.concatenate([_NONE, *parts]) for parts in ([s.starts for s in each], [s.stops for s in each]))
        )
        order = np.argsort(self._all.starts, kind="stable")
        self._owners = np.repeat(np.arange(len(each)), np.diff(self._ends))[order]
        self._sorted = Spans(self._all.starts[order], self._all.stops[order])

    def __len__(self) -> int:
        return self._ends.size - 1

    @property
    def elements(self) -> Places:
        """Of each owner, int64 [n]."""
        sums = np.cumsum(np.concatenate([[0], self._all.stops - self._all.starts]))
        return np.diff(sums[self._ends])

    @property
    def intervals(self) -> Places:
        """How many each owner has, int64 [n]."""
        return np.diff(self._ends)

    def shared(self) -> tuple[int, int, int] | None:
        """Two owners that have the same element, and an element that they share; None if no two do."""
        at = np.flatnonzero(self._sorted.stops[:-1] > self._sorted.starts[1:])
        if at.size == 0:
            return None
        second = int(at[0]) + 1
        return int(self._owners[second - 1]), int(self._owners[second]), int(self._sorted.starts[second])

    def over(self, wanted: Spans) -> Places:
        """The owners that have elements of `wanted`, ascending. No two owners may share an element."""
        first = np.searchsorted(self._sorted.stops, wanted.starts, "right")
        last = np.searchsorted(self._sorted.starts, wanted.stops, "left")
        return np.unique(self._owners[_ranges(first, np.maximum(first, last))])

    def of(self, owners: Places) -> Spans:
        """All elements of `owners`, in as few intervals as possible."""
        at = _ranges(self._ends[owners], self._ends[owners + 1])
        return union(Spans(self._all.starts[at], self._all.stops[at]))


def _ranges(first: Places, last: Places) -> Places:
    """The numbers of every range [first[i], last[i]), one after another."""
    sizes = last - first
    ends = np.cumsum(sizes)
    return np.repeat(first - (ends - sizes), sizes) + np.arange(sizes.sum())
