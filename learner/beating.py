"""A sign of life during one long call that gives none itself (DeepSpeed writing or reading a checkpoint).

Invariant: the signs end with the call, or at a deadline that follows from the bytes to be moved, whichever comes first: a
call that hangs is taken for hung by whoever watches the process, only later. Held by
tests/unit/learner/test_beating.py.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import structlog

EVERY_S = 1.0
SLOWEST_BYTES_PER_S = 20e6  # of a disk that is worth waiting for
LEAST_S = 120.0


def file_deadline_s(size_bytes: int) -> float:
    """How long moving so many bytes to or from files may take."""
    return LEAST_S + size_bytes / SLOWEST_BYTES_PER_S


@contextlib.contextmanager
def beating(
    heartbeat: Callable[[], object], what: str, *, deadline_s: float, every_s: float = EVERY_S
) -> Iterator[None]:
    """Call `heartbeat` in a thread of its own until the block ends, for `deadline_s` at most."""
    over = threading.Event()

    def beat() -> None:
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            heartbeat()
            if over.wait(every_s):
                return
        structlog.get_logger().error("a call takes too long: no more signs of life", what=what, deadline_s=deadline_s)

    thread = threading.Thread(target=beat, name="beating", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
