"""Runs a set of commands as one: restarts what fails, stops all of it together, leaves nothing behind.

Invariant: when `Supervisor`'s context has been left, or its process has died in any way (kill −9 included), no
process it started is alive and no temporary folder it made exists. Three things hold that up: every child has a
parent-death signal, every child is the leader of a group that is killed with it, and the janitor
(`deploy/janitor.py`) outlives the supervisor by as long as cleaning takes. Held by tests/process/test_supervisor.py.

    STARTING -> RUNNING -> STOPPING -> OVER

A run ends COMPLETED (a child with `completes_run` exited 0), FAILED (a child may not be restarted any more),
INTERRUPTED (SIGINT, SIGTERM, SIGHUP, or that child was told to stop). A second signal while stopping kills at once.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from anabranch.deploy.child import Child, ChildSpec, ChildState, RestartLimits
from anabranch.deploy.cleanup import Cleanup
from anabranch.schemas.errors import EXIT_INTERNAL, EXIT_TEMPORARY, DeadlineError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ONE_KEYSTROKE_S = 0.4  # one Ctrl-C can arrive twice: from the terminal, and passed on by `timeout` or `make`


class State(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    OVER = "over"


class End(StrEnum):
    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `exit_code` is what the supervising program should return; `line` says it in one line."""

    end: End
    line: str
    exit_code: int
    log: Path | None = None
    log_tail: tuple[str, ...] = ()


class Supervisor:
    """Use as a context manager in the main thread; add children, then `run`.

    Args:
        log_dir: where each child's output is appended, one file per name.
        environment: what every child gets, nothing is inherited beyond it; may be changed before children are added.
        limits: restart budget and backoff.
        stop_deadline_s: from SIGTERM to SIGKILL.
        finish_grace_s: how long children with `ends_itself` may take after the run is complete.
        is_complete: asked when a child with `completes_run` or `ends_itself` has exited 0: the first may only have been
            told to stop, and the second is still needed then.
        between: called once while stopping, after the children of the lowest stop order and before the others.
        tick: called about every `tick_s`, also while stopping; must not block for long.
        hold_fds: descriptors that the janitor keeps open too.
    """

    def __init__(
        self,
        log_dir: Path,
        *,
        environment: Mapping[str, str],
        limits: RestartLimits | None = None,
        stop_deadline_s: float = 20.0,
        finish_grace_s: float = 20.0,
        is_complete: Callable[[], bool] = lambda: True,
        between: Callable[[], None] | None = None,
        tick: Callable[[], None] | None = None,
        tick_s: float = 0.1,
        hold_fds: Sequence[int] = (),
    ) -> None:
        self.log_dir = log_dir
        self.state = State.STARTING
        self.children: list[Child] = []
        self.tick = tick
        self.environment = dict(environment)
        self._limits = limits or RestartLimits()
        self._stop_deadline_s = stop_deadline_s
        self._finish_grace_s = finish_grace_s
        self._tick_s = tick_s
        self._is_complete = is_complete
        self._between = between
        self._hold_fds = hold_fds
        self._signals: list[int] = []
        self._signalled_at = -math.inf
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._on_signal)
        try:
            self.cleanup = Cleanup(hold_fds=self._hold_fds)
        except BaseException:
            self._restore_signals()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.state is not State.OVER:
                self.tick = self._between = None  # one of them may be what failed
                self._bring_down(grace_s=0.0, term_s=self._stop_deadline_s if kind is None else 5.0)
        finally:
            self.cleanup.close()
            for child in self.children:
                child.close()
            self._restore_signals()

    @property
    def interrupted(self) -> bool:
        return bool(self._signals)

    @property
    def restarts(self) -> int:
        return sum(child.restarts for child in self.children)

    def folder(self, prefix: str = "anabranch-") -> Path:
        """A temporary folder that goes away with the run, however it ends."""
        return self.cleanup.folder(prefix)

    def add(self, spec: ChildSpec) -> Child:
        """Start a child now. Its log is `log_dir/NAME.log`."""
        if any(child.spec.name == spec.name for child in self.children):
            raise ValueError(f"a child named {spec.name!r} exists already")
        child = Child(
            spec,
            log=self.log_dir / f"{spec.name}.log",
            environment=self.environment,
            cleanup=self.cleanup,
            limits=self._limits,
        )
        self.children.append(child)
        child.start()
        return child

    def forget(self, child: Child) -> None:
        """Take a child that is over off the list."""
        assert child.over, f"{child.spec.name} is {child.state}"
        self.children.remove(child)
        child.close()

    def run_until(self, ready: Callable[[], bool], *, what: str, deadline_s: float) -> Outcome | None:
        """Supervise until `ready()`; the outcome if the run ended before.

        Raises:
            DeadlineError: not ready in time; names `what`.
        """
        give_up = time.monotonic() + deadline_s
        while not ready():
            if (outcome := self._turn()) is not None:
                return self._finish(outcome)
            if time.monotonic() > give_up:
                raise DeadlineError.waiting_for(what, deadline_s, f"see the logs in {self.log_dir}")
        return None

    def run_to_end(self, child: Child, *, deadline_s: float) -> Outcome | None:
        """Supervise until `child`, a one-off command, has exited 0; the outcome if the run ended otherwise."""
        return self.run_until(
            lambda: child.state is ChildState.ENDED, what=f"{child.spec.name} to finish", deadline_s=deadline_s
        )

    def run(self) -> Outcome:
        """Supervise until the run ends, then stop every child in order."""
        self.state = State.RUNNING
        while (outcome := self._turn()) is None:
            pass
        return self._finish(outcome)

    def _turn(self) -> Outcome | None:
        """One round: signals, exits and restarts, the tick, a short sleep."""
        self.cleanup.check()
        for child in self.children:
            before = child.state
            child.poll()
            if child.state is ChildState.ENDED is not before and child.spec.ends_itself and not self._is_complete():
                child.ended_too_soon()
        if self._signals:
            name = signal.Signals(self._signals[0]).name
            return Outcome(End.INTERRUPTED, f"interrupted by {name}", 128 + self._signals[0])
        for child in self.children:
            if child.state is ChildState.FAILED:
                return _failure(child)
            if child.state is ChildState.ENDED and child.spec.completes_run:
                if not self._is_complete():
                    return Outcome(
                        End.INTERRUPTED, f"{child.spec.name} stopped before the run was complete", EXIT_TEMPORARY
                    )
                return Outcome(End.COMPLETED, f"{child.spec.name} has finished", 0)
        if self.state is State.RUNNING and all(child.over for child in self.children):
            return Outcome(End.COMPLETED, "every process has finished", 0)
        if self.tick is not None:
            self.tick()
        time.sleep(self._tick_s)
        return None

    def _finish(self, outcome: Outcome) -> Outcome:
        grace = self._finish_grace_s if outcome.end is End.COMPLETED else 0.0
        self._bring_down(grace_s=grace, term_s=self._stop_deadline_s)
        return outcome

    def _bring_down(self, *, grace_s: float, term_s: float) -> None:
        self.state = State.STOPPING
        for child in self.children:
            if not child.alive:
                child.terminate()  # out of BACKOFF: nothing starts from here on
        for order in sorted({child.spec.stop_order for child in self.children}):
            batch = [child for child in self.children if child.spec.stop_order == order]
            self._wait([child for child in batch if child.spec.ends_itself], grace_s, end=False)
            for child in batch:
                child.terminate()
            self._wait(batch, term_s)
            for child in batch:
                child.kill()
            self._wait(batch, 10.0, stubborn=True)
            if self._between is not None:
                between, self._between = self._between, None
                between()
        self.state = State.OVER

    def _wait(self, batch: Sequence[Child], seconds: float, *, end: bool = True, stubborn: bool = False) -> None:
        """Until all of `batch` are gone, `seconds` have passed, or (unless `stubborn`) a further signal asks for haste."""
        began = time.monotonic()
        while any(child.alive for child in batch) and time.monotonic() < began + seconds:
            if not stubborn and len(self._signals) > (1 if end else 0):
                return
            for child in batch:
                limit_s = child.spec.stop_within_s
                if end and limit_s is not None and time.monotonic() > began + limit_s:
                    child.kill()
                if child.alive:
                    child.poll()
                    if not child.alive and not child.over:
                        child.terminate()
            if self.tick is not None:
                self.tick()
            time.sleep(min(self._tick_s, 0.05))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._signalled_at > _ONE_KEYSTROKE_S:
            self._signals.append(number)
        self._signalled_at = now

    def _restore_signals(self) -> None:
        for number, handler in self._previous.items():
            with contextlib.suppress(ValueError, TypeError):
                signal.signal(number, handler)


def _failure(child: Child) -> Outcome:
    code = child.exit_code if child.exit_code is not None and child.exit_code > 0 else EXIT_INTERNAL
    line = f"{child.spec.name} stopped the run: {child.reason}"
    return Outcome(End.FAILED, line, code, child.log, tuple(child.log_tail()))
