"""What the learner's loop does about checkpoints: when one begins, and what follows when it is durable.

Invariant: the lines of `metrics.jsonl` up to a checkpoint's step are durable before it is, so a learner that resumes from it
has no step without a line; entries are settled only for what the durable checkpoint holds, whatever was consumed since. Held
by tests/unit/learner/test_loop_checkpoints.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from anabranch.learner.checkpoint import Checkpointed, CheckpointStore
from anabranch.learner.checkpoint_writer import CheckpointWriter, Durable
from anabranch.learner.feed import Feed
from anabranch.transport.metrics_log import MetricsLog

CLOSE_S = 60.0


class Checkpointing:
    """Args:
    newest: the step of the checkpoint that the learner came from, −1 if none.
    durable: told of each that has become durable, after the feed.
    heartbeat: called while the loop waits here.
    """

    def __init__(
        self,
        engine: Checkpointed,
        store: CheckpointStore,
        feed: Feed,
        metrics: MetricsLog,
        *,
        background: bool,
        newest: int,
        durable: Callable[[Durable], object],
        heartbeat: Callable[[], object] = lambda: None,
    ) -> None:
        self._engine, self._feed, self._metrics, self._durable = engine, feed, metrics, durable
        self._writer = CheckpointWriter(store, background=background, heartbeat=heartbeat)
        self._newest = newest
        self._seconds = 0.0

    def begin(self, client_state: Callable[[], dict[str, Any]], waiting: Callable[[str], object]) -> None:
        """Begin one of the present step, unless there is one; the one before is waited for. `client_state` gives what it
        must hold beside the engine and the feed.

        Raises TemporaryError: one cannot be written; DeadlineError: the one before does not become durable.
        """
        if self._newest == self._engine.step:
            return
        started = time.monotonic()
        self.settle(waiting)
        self._metrics.sync()
        self._writer.begin(self._engine, client_state() | {"feed": self._feed.state()})
        self._newest = self._engine.step
        self._seconds += time.monotonic() - started
        self.look()

    def look(self) -> None:
        """Settle what has become durable. Raises TemporaryError: a checkpoint cannot be written."""
        self._tell(self._writer.poll())

    def settle(self, waiting: Callable[[str], object]) -> None:
        """Wait until nothing is being made; `waiting` is told what is waited for. Raises as `begin`."""
        self._tell(self._writer.wait(waiting))

    def seconds(self) -> float:
        """How long the loop has waited here since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        """The loop ends, perhaps of a failure. What is nearly done is not thrown away; never raises."""
        self._writer.close(deadline_s=CLOSE_S)

    def _tell(self, done: Durable | None) -> None:
        if done is not None:
            self._feed.checkpointed(done.client_state["feed"])
            self._durable(done)
