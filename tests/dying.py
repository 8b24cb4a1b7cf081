"""A process that dies in the middle of its work on files, without a process: for tests of what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


class Killed(BaseException):
    """No `except Exception` stops it, as none stops a kill -9."""


class Death:
    """Lets `acts` acts pass and dies before the next one, and before each that follows: the dead do nothing more."""

    def __init__(self, acts: int) -> None:
        self.left = acts

    def before(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def acted(*args: Any, **kwargs: Any) -> Any:
            if self.left <= 0:
                raise Killed
            self.left -= 1
            return act(*args, **kwargs)

        return acted


@contextlib.contextmanager
def dies_after(acts: int) -> Iterator[Death]:
    """Within, `os.rename`, `os.unlink` and `os.fsync` are such acts (as `Path` and this project's files call them). Who dies before a
    file is synced leaves half of it."""
    death = Death(acts)
    sync = death.before(os.fsync)

    def sync_or_tear(descriptor: int) -> None:
        try:
            sync(descriptor)
        except Killed:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            raise

    with contextlib.ExitStack() as patches:
        for name in ("rename", "unlink"):
            patches.enter_context(mock.patch.object(os, name, death.before(getattr(os, name))))
        patches.enter_context(mock.patch.object(os, "fsync", sync_or_tear))
        yield death
