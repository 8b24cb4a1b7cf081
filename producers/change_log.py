"""What the last few advances of a node's mirror changed: the journal of the one under way, and the way to catch up for
producers that serve an older version.

Invariant: a record holds absolute values (flat indices and new bits), so writing it twice is writing it once. Records of
consecutive sequence numbers are kept, newest first, up to a budget of bytes; whoever asks for changes since a number
whose records are not all there is told that it cannot know. Held by tests/unit/producers/test_change_log.py.

A record: int64 [n, 5] of tensor, form, start, count, data offset, then the data, each array 8-byte aligned. Form 0: count
elements from `start`, bits alone. Form 4 or 8: uint32 or int64 indices [count], then bits [count].
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.delta_codec import TensorChange
from anabranch.kernels.delta_dtypes import uint_dtype
from anabranch.producers.mirror_memory import LOG_SLOTS, PAGE, MirrorMemory
from anabranch.schemas.layout import Layout

RANGE = 0
WHOLE_SHARE = 16  # of places of a tensor, from which putting records together costs more than copying it whole

Changed = dict[str, NDArray[np.int64] | None]  # tensor -> ascending flat indices, or None for all of it


def _aligned(size: int, unit: int = 8) -> int:
    return -(-size // unit) * unit


class ChangeLog:
    """Over the memory of one mirror. Who writes has the mirror to itself; who reads keeps writers out."""

    def __init__(self, memory: MirrorMemory, layout: Layout, *, budget_bytes: int) -> None:
        self._memory, self._layout, self._budget = memory, layout, budget_bytes
        self._number = {spec.name: i for i, spec in enumerate(layout.tensors)}

    def append(self, seq: int, changes: Sequence[TensorChange]) -> bool:
        """Write record `seq`, dropping older ones where it needs their place. False, and the log is empty then, if it
        has no room for it at all."""
        forms = [self._form(change) for change in changes]
        at = table_bytes = _aligned(40 * len(changes))
        table = np.empty((len(changes), 5), np.int64)
        for i, (change, form) in enumerate(zip(changes, forms, strict=True)):
            table[i] = self._number[change.name], form, change.start, change.bits.size, at
            at += _aligned(form * change.bits.size) + _aligned(change.bits.nbytes)
        offset = self._place(_aligned(max(at, 1), PAGE))
        if offset is None:
            self.clear()
            return False
        record = self._memory.log[offset : offset + at]
        record[:table_bytes].view(np.int64)[: table.size] = table.reshape(-1)
        for (_, form, _, count, start), change in zip(table.tolist(), changes, strict=True):
            if form != RANGE:
                assert change.indices is not None
                record[start : start + form * count].view(np.uint32 if form == 4 else np.int64)[:] = change.indices
                start += _aligned(form * count)
            record[start : start + change.bits.nbytes].view(change.bits.dtype)[:] = change.bits
        slot = self._slots[seq % LOG_SLOTS]
        if int(slot["seq"]):
            self._drop(slot)
        slot["offset"], slot["size"] = offset, at
        slot["seq"] = seq  # last: a slot counts once it has its number
        return True

    def read(self, seq: int) -> list[TensorChange] | None:
        """The changes of record `seq`, as views of the log where they can be; None if it is gone."""
        slot = self._slots[seq % LOG_SLOTS]
        if int(slot["seq"]) != seq:
            return None
        record = self._memory.log[int(slot["offset"]) : int(slot["offset"]) + int(slot["size"])]
        changes = []
        for tensor, form, start, count, at in self._table(record):
            spec = self._layout.tensors[tensor]
            dtype = np.dtype(uint_dtype(spec.dtype))
            indices = None if form == RANGE else self._indices(record, form, count, at)
            at += _aligned(form * count)
            bits = record[at : at + dtype.itemsize * count].view(dtype)
            changes.append(TensorChange(spec.name, indices, bits, start))
        return changes

    def changed_since(self, seq: int, now: int) -> Changed | None:
        """What records seq + 1 .. `now` touch, together; None if one of them is gone."""
        wanted = range(seq + 1, now + 1)
        if len(wanted) > LOG_SLOTS or any(int(self._slots[s % LOG_SLOTS]["seq"]) != s for s in wanted):
            return None
        touched: dict[str, list[NDArray[np.int64]] | None] = {}
        for number in wanted:
            for change in self.read(number) or ():
                before = touched.setdefault(change.name, [])
                if change.indices is None:
                    touched[change.name] = None
                elif before is not None:
                    before.append(change.indices)
        return {name: None if pieces is None else self._union(name, pieces) for name, pieces in touched.items()}

    def _union(self, name: str, pieces: list[NDArray[np.int64]]) -> NDArray[np.int64] | None:
        """Ascending, each once; None where whole is cheaper. Pieces of one record do not overlap, so most of the time they
        only need to be put in order."""
        pieces = sorted((p for p in pieces if p.size), key=lambda p: int(p[0]))
        if len(pieces) < 2:
            return pieces[0] if pieces else np.empty(0, np.int64)
        together = np.concatenate(pieces)
        if all(int(a[-1]) < int(b[0]) for a, b in itertools.pairwise(pieces)):
            return together
        if together.size * WHOLE_SHARE > self._layout.by_name[name].numel:
            return None
        together.sort(kind="stable")  # which merges runs that are in order already
        once: NDArray[np.int64] = together[np.append(True, together[1:] != together[:-1])]
        return once

    def trim(self) -> None:
        """Drop the oldest records until the rest fit the budget, and give their memory back."""
        kept = 0
        for slot in sorted(self._live(), key=lambda s: -int(s["seq"])):
            kept += _aligned(int(slot["size"]), PAGE)
            if kept > self._budget:
                self._drop(slot)

    def clear(self) -> None:
        for slot in self._live():
            self._drop(slot)

    @property
    def _slots(self) -> NDArray[np.void]:
        slots: NDArray[np.void] = self._memory.header["slots"][0]
        return slots

    def _live(self) -> list[np.void]:
        return [slot for slot in self._slots if int(slot["seq"])]

    def _drop(self, slot: np.void) -> None:
        slot["seq"] = 0
        self._memory.free_log(int(slot["offset"]), _aligned(max(int(slot["size"]), 1), PAGE))

    def _place(self, size: int) -> int | None:
        """Where a record of `size` bytes (whole pages) goes: behind the newest, or at the front. Drops what is there."""
        if size > len(self._memory.log):
            return None
        newest = max(self._live(), key=lambda s: int(s["seq"]), default=None)
        offset = 0 if newest is None else int(newest["offset"]) + _aligned(max(int(newest["size"]), 1), PAGE)
        if offset + size > len(self._memory.log):
            offset = 0
        for slot in self._live():
            end = int(slot["offset"]) + _aligned(max(int(slot["size"]), 1), PAGE)
            if int(slot["offset"]) < offset + size and offset < end:
                self._drop(slot)
        return offset

    def _form(self, change: TensorChange) -> int:
        if change.indices is None:
            return RANGE
        return 4 if self._layout.by_name[change.name].numel <= 2**32 else 8

    @staticmethod
    def _table(record: NDArray[np.uint8]) -> Iterable[tuple[int, int, int, int, int]]:
        """Its rows: as many as lie before the first data."""
        if not len(record):
            return []
        head = record[: len(record) // 8 * 8].view(np.int64)
        rows = int(head[4]) // 40
        return [(a, b, c, d, e) for a, b, c, d, e in head[: 5 * rows].reshape(rows, 5).tolist()]

    @staticmethod
    def _indices(record: NDArray[np.uint8], form: int, count: int, at: int) -> NDArray[np.int64]:
        return record[at : at + form * count].view(np.uint32 if form == 4 else np.int64).astype(np.int64)
