"""Finds the fates of groups in a log that grows, reading each line once.

Invariant: a fate that is in the log is found for whoever asks for it, at once if it is among the newest `RECENT_ROWS` or was written since he asked
first, else after the next `look_back`. Memory: those rows, and what is asked for. Held by tests/unit/consumers/test_fate_follower.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from anabranch.consumers.fate_files import FATES_DIRECTORY, fate_files
from anabranch.consumers.json_tail import JsonTail
from anabranch.consumers.run_tables import FATES
from anabranch.schemas.fates import Identity

RECENT_ROWS = 200_000
_KEYS = ("region", "producer", "seq")
Fate = dict[str, Any]  # the columns of `FATES`


class FateFollower:
    def __init__(self, run_directory: Path) -> None:
        self._directory = run_directory / FATES_DIRECTORY
        self._tail = JsonTail(FATES)
        self._recent: deque[pa.Table] = deque()
        self._asked: set[Identity] = set()
        self._found: dict[Identity, Fate] = {}

    def find(self, wanted: Collection[Identity]) -> dict[Identity, Fate]:
        """The fates of as many of `wanted` as have one; what was wanted before and is not any more is forgotten. Raises OSError."""
        names = set(wanted)
        fresh = names - self._asked
        self._asked = names
        self._found = {name: fate for name, fate in self._found.items() if name in names}
        for table in self._recent:
            self._take(table, fresh - self._found.keys())
        _, new = self._tail.read([path for _, path in fate_files(self._directory)])
        for table in new:
            self._take(table, names - self._found.keys())
            self._recent.append(table)
            while sum(map(len, self._recent)) - len(self._recent[0]) >= RECENT_ROWS:
                self._recent.popleft()
        return dict(self._found)

    def look_back(self) -> None:
        """Read the whole log again at the next `find`."""
        self._tail = JsonTail(FATES)
        self._recent.clear()

    def _take(self, table: pa.Table, names: Collection[Identity]) -> None:
        if not names:
            return
        rows: Iterable[Identity] = zip(*(table[key].to_pylist() for key in _KEYS), strict=True)
        for at, name in enumerate(rows):
            if name in names:
                self._found.setdefault(name, table.slice(at, 1).to_pylist()[0])
