"""One background thread: does what it is handed, in order, and small pieces of other work while nothing is handed.

Invariant: work that is handed over waits for at most one call of `idle`, and each piece of work is followed by one: where
there is always work, the rest gets on too. The first failure ends the thread, is logged, and
is raised in whoever hands over, waits or asks from then on; nothing is done after it. Held by
tests/unit/learner/test_publish_worker.py.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections import deque
from collections.abc import Callable

import structlog

from anabranch.schemas.errors import AnabranchError, DeadlineError

_WAKE_S = 0.2  # how often a wait calls the heartbeat


class WorkerState(enum.Enum):
    IDLE = "idle"
    WORKING = "working"
    FAILED = "failed"
    CLOSED = "closed"


class PublishWorker:
    """Args:
    idle: does a few milliseconds of work; returns in how many seconds it wants to be called again, None if only after
        the next handed-over work.
    at_end: called in the thread as the last thing.
    """

    def __init__(
        self, name: str, idle: Callable[[], float | None], *, at_end: Callable[[], object] = lambda: None
    ) -> None:
        self._idle, self._at_end = idle, at_end
        self._work: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._idle_at: float | None = None
        self._owes_idle = False
        self.stopping = threading.Event()
        self.state = WorkerState.IDLE
        self._progress_s = 0.0
        self.cpu_s = 0.0  # of this thread alone
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], object]) -> None:
        with self._changed:
            self._raise_failure()
            self._work.append(work)
            self._changed.notify_all()

    def check(self) -> None:
        """Raises what the thread has failed with."""
        with self._changed:
            self._raise_failure()

    def progress(self) -> None:
        """The work at hand gets on: what `wait`s has its deadline anew."""
        self._progress_s = time.monotonic()

    def tell(self) -> None:
        """What `wait` waits for may have come true."""
        with self._changed:
            self._changed.notify_all()

    @property
    def is_free(self) -> bool:
        """All that was handed over is done."""
        return not self._work and self.state is WorkerState.IDLE

    @property
    def is_quiet(self) -> bool:
        """`is_free`, and `idle` has nothing left."""
        return self.is_free and self._idle_at is None

    def wait(self, done: Callable[[], bool], *, deadline_s: float, what: str, heartbeat: Callable[[], object]) -> None:
        """Until `done()`, which is asked again after every piece of work and every `tell`. `deadline_s` counts from now,
        or from when the work has last got on.

        Raises DeadlineError naming `what`, or what the thread has failed with.
        """
        started_s = time.monotonic()
        while True:
            with self._changed:
                self._raise_failure()
                if done():
                    return
                left_s = max(started_s, self._progress_s) + deadline_s - time.monotonic()
                if left_s <= 0:
                    raise DeadlineError.waiting_for(what, deadline_s)
                self._changed.wait(min(left_s, _WAKE_S))
            heartbeat()

    def close(self, *, deadline_s: float) -> None:
        """Have the thread end, at the end of the piece of work it is at. Never raises: what failed has been told."""
        self.stopping.set()
        self.tell()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            structlog.get_logger().warning("a publishing thread does not end", thread=self._thread.name)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self.stopping.is_set():
            raise AnabranchError(f"{self._thread.name} has been closed")

    def _run(self) -> None:
        try:
            while not self.stopping.is_set():
                self._turn()
                self.cpu_s = time.thread_time()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asks
            if not self.stopping.is_set():
                structlog.get_logger().error("publishing has failed", thread=self._thread.name, error=repr(error))
            with self._changed:
                self._failure, self.state = error, WorkerState.FAILED
        else:
            self.state = WorkerState.CLOSED
        finally:
            with contextlib.suppress(Exception):
                self._at_end()
            self.tell()

    def _turn(self) -> None:
        with self._changed:
            now = time.monotonic()
            if not self._work and (self._idle_at is None or self._idle_at > now):
                self._changed.wait(None if self._idle_at is None else self._idle_at - now)
                return
            work = self._work.popleft() if self._work and not self._owes_idle else None
            if work is not None:
                self.state = WorkerState.WORKING
        if work is not None:
            work()
            self.progress()
            again: float | None = 0.0
        else:
            again = self._idle()
        self._owes_idle = work is not None
        with self._changed:
            self._idle_at = None if again is None else time.monotonic() + again
            self.state = WorkerState.IDLE
            self._changed.notify_all()
