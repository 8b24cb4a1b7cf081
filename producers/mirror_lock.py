"""Locks between the processes of a node, which the kernel drops when their holder dies.

Invariant: a lock is an flock on an open file description of its own, so it ends with `unlock`, `close` or the process,
whichever comes first. A child made by fork alone shares that description and would keep the lock of a dead parent for
ever: it gives its copies up at once. Waiting for a lock has a deadline, and who gives up names the process that holds it.
Held by tests/unit/producers/test_mirror_lock.py.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from anabranch.schemas.errors import DeadlineError

POLL_S = 0.002  # a holder is done within milliseconds, and flock itself cannot wait with a deadline


class Closes(Protocol):
    def close(self) -> None: ...


_OPEN: weakref.WeakSet[Closes] = weakref.WeakSet()


def close_in_children(descriptors: Closes) -> None:
    """A child made by fork closes its copies of `descriptors` (which unlocks nothing) before it runs anything."""
    _OPEN.add(descriptors)


def _after_fork() -> None:
    for descriptors in list(_OPEN):
        descriptors.close()


os.register_at_fork(after_in_child=_after_fork)


class FileLock:
    """A lock on the file at `path` (which may be a memory in /proc/PID/fd). One thread uses it; a second one of the
    same process opens its own. `what` is what the lock guards, for messages."""

    def __init__(self, path: str | Path, what: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._what = what
        close_in_children(self)

    def try_lock(self, *, shared: bool = False) -> bool:
        """Take it if it is free (or, `shared`, not held exclusively). Converts a lock that is held already."""
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def lock(self, *, shared: bool = False, deadline_s: float) -> None:
        """Raises DeadlineError: it was not free within `deadline_s`; names the holders' process ids."""
        end = time.monotonic() + deadline_s
        while not self.try_lock(shared=shared):
            if time.monotonic() >= end:
                raise DeadlineError.waiting_for(
                    f"{self._what}, held by {self.holder()}",
                    deadline_s,
                    "if that process is stopped or stuck, continue or kill it",
                )
            time.sleep(POLL_S)

    def unlock(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    @contextmanager
    def held(self, *, shared: bool = False, deadline_s: float) -> Iterator[None]:
        self.lock(shared=shared, deadline_s=deadline_s)
        try:
            yield
        finally:
            self.unlock()

    def holder(self) -> str:
        """ "process 123", for messages."""
        pids = [pid for pid in holders(self._fd) if pid != os.getpid()] or holders(self._fd)
        return " and ".join(f"process {pid}" for pid in pids) or "a process that cannot be seen from here"

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()


def holders(fd: int) -> list[int]:
    """Process ids that hold an flock on the file of `fd`, as far as /proc/locks shows them, ascending."""
    stat = os.fstat(fd)
    place = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    try:
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return []
    return sorted({int(row[4]) for row in rows if len(row) > 5 and row[1] == "FLOCK" and row[5] == place})
