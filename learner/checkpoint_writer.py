"""The checkpoint that is being made: its files are written while the loop waits, it becomes durable while the loop goes on.

Invariant: one checkpoint at a time; `poll` and `wait` tell of each that has become durable exactly once, and raise what made
one fail. What hangs in the background is not taken for alive: whoever waits gives no sign of life for it beyond a deadline
since its last block. Held by tests/unit/learner/test_checkpoint_writer.py and tests/process/test_checkpoint_kills.py.

    idle → writing (the caller's thread) → finishing (a thread of its own) → idle
                                   failed: for good; the learner starts again from the checkpoint before
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anabranch.learner.checkpoint import Checkpointed, CheckpointStore, Unfinished
from anabranch.schemas.errors import AnabranchError, DeadlineError, TemporaryError

STALL_S = 600.0  # without a block written or read back: a disk that does not get on
_WAKE_S = 0.2


class WriterState(enum.Enum):
    IDLE = "idle"
    WRITING = "writing"
    FINISHING = "finishing"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Durable:
    """A checkpoint that is complete. `client_state` is what it was begun with."""

    step: int
    client_state: dict[str, Any]
    bytes: int
    write_s: float  # the engine stood still
    finish_s: float


class CheckpointWriter:
    """Args:
    background: `begin` returns as soon as the files are written; else when the checkpoint is durable.
    heartbeat: called while `begin` or `wait` last.
    """

    def __init__(
        self, store: CheckpointStore, *, background: bool, heartbeat: Callable[[], object] = lambda: None
    ) -> None:
        self._store, self._background, self._heartbeat = store, background, heartbeat
        self._changed = threading.Condition()
        self._state, self._step = WriterState.IDLE, -1
        self._done: Durable | None = None
        self._failure: BaseException | None = None
        self._progress_s = 0.0
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> WriterState:
        return self._state

    def begin(self, engine: Checkpointed, client_state: dict[str, Any]) -> None:
        """Write the files of a checkpoint of the present step. `poll` or `wait` tell when it is durable.

        Raises:
            AnabranchError: the one before is not told of yet.
            TemporaryError: the disk is full or not writable.
        """
        if self._state is not WriterState.IDLE or self._done is not None:
            raise AnabranchError(f"the checkpoint of step {self._step} is {self._state.value}; wait for it first")
        self._state, self._step = WriterState.WRITING, engine.step
        started = time.monotonic()
        try:
            unfinished = self._store.begin(engine, client_state)
        except BaseException as error:
            self._fail(error)
            self._raise_failure()
            raise
        write_s = time.monotonic() - started
        self._progress()
        self._state = WriterState.FINISHING
        name = f"checkpoint-{self._step}"
        thread = threading.Thread(target=self._finish, args=(unfinished, client_state, write_s), name=name, daemon=True)
        self._thread = thread
        thread.start()
        if not self._background:
            self._wait_for_thread()

    def poll(self) -> Durable | None:
        """The checkpoint that has become durable since the last call; raises TemporaryError if it cannot."""
        with self._changed:
            self._raise_failure()
            done, self._done = self._done, None
            return done

    def wait(self, waiting: Callable[[str], object] = lambda _: None) -> Durable | None:
        """As `poll`, when nothing is being made any more; `waiting` is told, often, what is waited for.

        Raises DeadlineError naming it when it has not got on for `STALL_S`.
        """
        self._wait_for_thread(waiting)
        return self.poll()

    def close(self, *, deadline_s: float) -> None:
        """The learner ends, perhaps of a failure: let what is nearly done be done. Never raises."""
        end = time.monotonic() + deadline_s
        while self._state is WriterState.FINISHING and time.monotonic() < end:
            with self._changed:
                self._changed.wait(_WAKE_S)
            self._heartbeat()

    def _wait_for_thread(self, waiting: Callable[[str], object] = lambda _: None) -> None:
        while self._state is WriterState.FINISHING:
            self._heartbeat()
            what = f"the checkpoint of step {self._step} to be on the disk"
            if time.monotonic() - self._progress_s > STALL_S:
                raise DeadlineError.waiting_for(what, STALL_S, "the disk does not get on")
            waiting(what)
            with self._changed:
                if self._state is WriterState.FINISHING:
                    self._changed.wait(_WAKE_S)

    def _finish(self, unfinished: Unfinished, client_state: dict[str, Any], write_s: float) -> None:
        started = time.monotonic()
        try:
            marker = self._store.finish(unfinished, progress=self._progress)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asks
            self._fail(error)
            return
        with self._changed:
            finish_s = time.monotonic() - started
            self._done = Durable(marker.step, client_state, marker.bytes, write_s, finish_s)
            self._state = WriterState.IDLE
            self._changed.notify_all()

    def _progress(self) -> None:
        self._progress_s = time.monotonic()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure, self._state = error, WriterState.FAILED
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if isinstance(self._failure, OSError) and not isinstance(self._failure, AnabranchError):
            raise TemporaryError(
                f"the checkpoint of step {self._step} cannot be written ({self._failure}): mend that (make room, if the disk is "
                "full), then start the learner again; it goes on from the checkpoint before"
            ) from self._failure
        if self._failure is not None:
            raise self._failure
