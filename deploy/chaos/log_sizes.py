"""How long the servers' append-only files were a moment ago, and cutting them back to that.

Invariant: nothing is cut that was there before the given moment, and never a file that nobody has looked at.
Held by tests/unit/deploy/chaos/test_log_sizes.py.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

_KEPT_S = 5.0


class LogSizes:
    """How long each server's newest append-only file was, a few seconds back; `look` at it several times a second."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders
        self._sizes: dict[str, deque[tuple[float, Path, int]]] = {name: deque() for name in folders}

    def look(self, now: float) -> None:
        for name, folder in self._folders.items():
            sizes = self._sizes[name]
            if (found := newest_log(folder)) is not None:
                sizes.append((now, *found))
            while sizes and sizes[0][0] < now - _KEPT_S:
                sizes.popleft()

    def cut(self, name: str, *, since: float) -> int:
        """Take off the newest file of `name` what came after `since`; returns how many bytes. Its server must be dead."""
        found = newest_log(self._folders[name])
        if found is None:
            return 0
        path, size = found
        of_this = [(when, then) for when, file, then in self._sizes[name] if file == path]
        if not of_this:  # a file begun since the last look: what is in it may be all there is
            return 0
        keep = max((then for when, then in of_this if when <= since), default=of_this[0][1])
        if keep >= size:
            return 0
        os.truncate(path, keep)
        return size - keep


def newest_log(folder: Path) -> tuple[Path, int] | None:
    """The append-only file that a server over `folder` writes now, and its size."""
    files = [(int(path.name.split(".")[-3]), path) for path in (folder / "appendonlydir").glob("*.incr.aof")]
    try:
        return (max(files)[1], max(files)[1].stat().st_size) if files else None
    except OSError:
        return None
