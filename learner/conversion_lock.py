"""One process at a time converts a checkpoint, and nothing that it reads or writes is removed meanwhile.

Invariant: whoever converts a checkpoint holds an flock on its marker, which ends with the process however that ends. A second one
waits, with a deadline; a learner that goes on meanwhile passes over the checkpoint and what is made of it. Held by
tests/unit/learner/test_universal.py and tests/process/test_checkpoint_kills.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from anabranch.learner.checkpoint_folder import MARKER
from anabranch.schemas.errors import DeadlineError

_POLL_S = 0.1


@contextlib.contextmanager
def converting(place: Path, *, deadline_s: float, heartbeat: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Inside, no other process converts the complete checkpoint `place`. `heartbeat` is called while one does.

    Raises:
        DeadlineError: another one does, for longer than `deadline_s`.
        OSError: the marker may not be written, or the file system knows no locks.
    """
    with (place / MARKER).open("r+b") as file:  # over NFS an exclusive lock takes a file that is open to be written
        end = time.monotonic() + deadline_s
        while not _locked(file, fcntl.LOCK_EX):
            heartbeat()
            if time.monotonic() > end:
                raise DeadlineError.waiting_for(f"another process to convert {place}", deadline_s)
            time.sleep(_POLL_S)
        yield


@contextlib.contextmanager
def not_converting(place: Path) -> Iterator[bool]:
    """Whether no process converts the checkpoint `place`; none begins to inside, then."""
    with contextlib.ExitStack() as files:
        try:
            free = _locked(files.enter_context((place / MARKER).open("rb")), fcntl.LOCK_SH)
        except OSError:  # it is not there, or there are no locks here: nobody can convert it
            free = True
        yield free


def _locked(file: BinaryIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
