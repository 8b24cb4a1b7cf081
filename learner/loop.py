"""The learner's loop: wait for a batch, step, publish, checkpoint; evaluation before the first and after the last step.

Invariant: version v is committed before permits for batch v + S are handed out (both by the publishing thread), and an
entry is acknowledged only when a checkpoint with its update is durable. Every start opens a new epoch, at the version of
the checkpoint it resumed from. Every wait has a deadline, `status` names what is waited for, and a failure of publishing
ends it. Held by tests/unit/learner/test_loop.py, tests/e2e/test_synchronous.py and tests/e2e/test_survival.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import structlog

from anabranch.learner.batch import TrainBatch, build_batch
from anabranch.learner.checkpoint import CheckpointStore
from anabranch.learner.checkpoint_writer import Durable
from anabranch.learner.checkpointing import Checkpointing
from anabranch.learner.collective import CollectiveEngine
from anabranch.learner.evaluation import evaluate
from anabranch.learner.feed import FedBatch, Feed
from anabranch.learner.hub_calls import HubCalls
from anabranch.learner.ledger_watch import LedgerWatch
from anabranch.learner.progress import LearnerState, Progress, learner_status
from anabranch.learner.publish_order import EpochOpening, Published
from anabranch.learner.record_order import RecordOrder
from anabranch.learner.records import step_record
from anabranch.learner.run_memory import RunMemory
from anabranch.learner.step import StepOutput
from anabranch.learner.step_recorder import StepRecorder
from anabranch.learner.weight_publisher import WeightPublisher
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import TemporaryError
from anabranch.schemas.metrics import NoteRecord, StepRecord
from anabranch.transport.metrics_log import MetricsLog
from anabranch.transport.wiring import Hub

STATUS_EVERY_S = 0.5
ADVANCE_EVERY_S = 5.0


class LearnerLoop:
    """Rank 0's loop. `resumed` is the client state of the checkpoint that `engine` was loaded from, if any; `recorder` is the
    engine's: with one, every step is recorded."""

    def __init__(
        self,
        engine: CollectiveEngine,
        feed: Feed,
        hub: Hub,
        checkpoints: CheckpointStore,
        memory: RunMemory,
        metrics: MetricsLog,
        config: RunConfig,
        *,
        watch: LedgerWatch,
        resumed: dict[str, Any] | None,
        recorder: StepRecorder | None = None,
        heartbeat: Callable[[], object] = lambda: None,
    ) -> None:
        self._engine, self._feed, self._hub = engine, feed, hub
        self._memory, self._metrics, self._config, self._resumed = memory, metrics, config, resumed
        self._heartbeat, self._watch, self._recorder = heartbeat, watch, recorder
        self._hub_call = HubCalls(deadline_s=config.channel.connect_deadline_s, heartbeat=heartbeat)
        self._progress = Progress(
            epoch=(resumed or {}).get("epoch", 0),
            version=engine.step,
            fork_version=engine.step,
            smoothed_reward=(resumed or {}).get("smoothed_reward"),
        )
        self._forks = {int(e): int(v) for e, v in (resumed or {}).get("forks", {}).items()}  # JSON keys are strings
        self._publisher: WeightPublisher | None = None
        self._started_s = time.monotonic()
        self._state, self._reported_s, self._advanced_s = LearnerState.STARTING, 0.0, 0.0
        self._checkpoints = checkpoints
        self._checkpointing = Checkpointing(
            engine, checkpoints, feed, metrics, background=config.learner.background_checkpoints,
            newest=engine.step if resumed else -1, durable=self._checkpointed, heartbeat=heartbeat,
        )  # fmt: skip
        self._log = structlog.get_logger()

    def run(self, should_stop: Callable[[], bool]) -> str:
        """Train until the configured steps are done, the target is reached or `should_stop()`; returns which."""
        learner = self._config.learner
        ended = self._memory.finished(self._engine.step) if self._resumed else None
        if ended is not None and (self._engine.step >= learner.steps or self._progress.reached(learner.target_reward)):
            return self._finish(ended)  # it died after the last evaluation; the producers may have ended already
        publisher = self._publisher = self._open_epoch()
        try:
            self._opened(publisher)
            return self._train(publisher, should_stop)
        finally:
            self._checkpointing.close()
            publisher.close()

    def _train(self, publisher: WeightPublisher, should_stop: Callable[[], bool]) -> str:
        learner = self._config.learner
        if learner.evaluate and not (self._resumed or {}).get("evaluated"):
            self._evaluate(should_stop)
        self._open_permits(self._config.learner.steps * learner.groups_per_step)
        reason = "all steps done"
        while self._engine.step < learner.steps:
            if self._progress.reached(learner.target_reward):
                reason = f"target reward {learner.target_reward} reached"
                break
            if not self._one_step(publisher, should_stop):
                return self._stopped(publisher)
        publisher.flush()
        self._open_permits(self._engine.step * learner.groups_per_step)  # nothing more to sample
        self._checkpoint(durable=True)
        self._checkpoints.export(self._engine)
        if learner.evaluate and not self._evaluate(should_stop):
            return self._stopped(publisher)  # not finished: the run still owes its last number
        self._memory.finish(self._engine.step, reason)
        return self._finish(reason)

    def _finish(self, reason: str) -> str:
        surplus = self._feed.drop_surplus(self._progress.policy, self._forks, waiting=self._still)
        self._note("finished", reason=reason, step=self._engine.step, surplus_groups=surplus)
        self._set_state(LearnerState.DONE)
        self._hub_call(lambda: self._hub.runs.finish(reason), "to mark the run finished")
        return reason

    def _stopped(self, publisher: WeightPublisher) -> str:
        self._checkpoint(durable=True)
        self._feed.flush()  # so that the books are even while nobody is there to even them
        with contextlib.suppress(TemporaryError):
            publisher.flush()  # the epoch after this one can begin as its fork then
            self._set_state(LearnerState.STOPPED)  # so that nobody takes it for one at work
        self._note("stopped", step=self._engine.step)
        return "stopped"

    def _open_epoch(self) -> WeightPublisher:
        progress = self._progress
        self._set_state(LearnerState.STARTING, "the hub")
        self._hub_call(self._hub.runs.start, "to start the run")
        # A hub that lost its data counts from 0 again, and producers know epochs opened since the checkpoint.
        above = max(self._memory.epoch, (self._resumed or {}).get("epoch", 0))
        progress.epoch = self._hub_call(lambda: self._hub.channel.open_epoch(above=above), "to open an epoch")
        self._memory.opened(progress.epoch)
        self._forks[progress.epoch] = progress.fork_version
        opening = EpochOpening(self._config.run.name, progress.epoch, progress.fork_version, self._engine.step)
        return self._engine.open_epoch(opening)

    def _opened(self, publisher: WeightPublisher) -> None:
        """The epoch's first version is on the channel when this returns."""
        progress = self._progress
        publisher.waiting = lambda what: self._set_state(LearnerState.PUBLISHING, what)
        first = publisher.flush()
        assert first is not None
        self._note(
            "resumed" if self._resumed else "started",
            epoch=progress.epoch,
            version=progress.version,
            begins_as=first.manifest.kind,
            published_bytes=first.payload_bytes,
            full_bytes=first.manifest.full_bytes,
            digest=first.manifest.result_digest,
        )
        if self._resumed is None:
            self._checkpoint()  # so that a crash in the first steps resumes from the same start
        else:
            self._feed.checkpointed(
                self._resumed["feed"]
            )  # the crash may have come between the checkpoint and its acknowledgements

    def _open_permits(self, total: int) -> None:
        progress, learner = self._progress, self._config.learner
        accepted = self._feed.drain_backlog(progress.policy, self._forks, waiting=self._still)
        self._hub_call(
            lambda: self._hub.permits.reset(
                epoch=progress.epoch, version=progress.version, batch=learner.groups_per_step,
                max_age=self._config.correction.max_age, total=total, accepted=accepted,
                abandoned=self._feed.trained.abandoned,
            ),
            "to open permits",
        )  # fmt: skip

    def _one_step(self, publisher: WeightPublisher, should_stop: Callable[[], bool]) -> bool:
        """False if `should_stop()` turned true while waiting."""
        progress, learner = self._progress, self._config.learner
        self._set_state(LearnerState.WAITING)
        fed = self._feed.next_batch(
            progress.policy, self._forks, deadline_s=learner.batch_deadline_s,
            waiting=lambda what: self._waiting(publisher, what), stop=should_stop,
        )  # fmt: skip
        if fed is None:
            return False
        self._set_state(LearnerState.STEPPING)
        started = time.monotonic()
        batch = build_batch(
            [a.group for a in fed.arrivals], now=progress.policy, forks=self._forks,
            max_age=self._config.correction.max_age,
        )  # fmt: skip
        record = self._recorder is not None
        order = RecordOrder.of(fed.arrivals, batch, now=progress.policy, forks=self._forks) if record else None
        output = self._engine.train_step(batch, order)
        self._feed.consumed(fed.arrivals, zero_variance=output.zero_variance_groups, gated=output.skipped_groups)
        for alarm in output.alarms:
            self._note(
                "gate", step=output.step, action=alarm.action, gate=alarm.gate, value=alarm.value, bound=alarm.bound
            )
        step_s = time.monotonic() - started
        self._set_state(LearnerState.PUBLISHING)
        publish_s = self._engine.publish(publisher, output.step)
        progress.version = output.step
        progress.saw_reward(float(batch.rewards.mean()))
        seconds = {"step_s": step_s, "publish_s": publish_s, "checkpoint_s": self._checkpointing.seconds()}
        self._metrics.append(self._record(fed, batch, output, publisher.published, **seconds))
        if output.step % learner.checkpoint_every == 0:
            self._checkpoint()  # after the line: a learner that resumes from it has no step without one
        return True

    def _waiting(self, publisher: WeightPublisher, what: str) -> None:
        """A batch is long in coming: a hub that forgot its last second may have forgotten the permits for it."""
        self._set_state(LearnerState.WAITING, what)
        published, now = publisher.published, time.monotonic()
        if published is None or now - self._advanced_s < ADVANCE_EVERY_S:
            return
        self._advanced_s = now
        epoch, abandoned = self._progress.epoch, self._feed.trained.abandoned
        self._hub_call(
            lambda: self._hub.permits.advance(published.version, epoch=epoch, abandoned=abandoned),
            "to repeat the permits",
        )

    def _checkpoint(self, *, durable: bool = False) -> None:
        """Begin one; `durable`: and wait for it."""
        self._set_state(LearnerState.CHECKPOINTING)
        self._checkpointing.begin(self._client_state, self._still)
        if durable:
            self._checkpointing.settle(self._still)

    def _client_state(self) -> dict[str, Any]:
        """What a checkpoint holds beside engine and feed."""
        return {
            "epoch": self._progress.epoch,
            "forks": dict(self._forks),
            "smoothed_reward": self._progress.smoothed_reward,
            "evaluated": self._engine.step > 0,
        }

    def _checkpointed(self, done: Durable) -> None:
        self._note(
            "checkpoint", step=done.step, bytes=done.bytes,
            write_s=round(done.write_s, 3), finish_s=round(done.finish_s, 3),
        )  # fmt: skip
        self._hub_call(self._hub.runs.drop_stale_producers, "to forget producers that are gone")

    def _evaluate(self, should_stop: Callable[[], bool]) -> bool:
        """False if `should_stop()` turned true before there was a result."""
        self._set_state(LearnerState.EVALUATING, "producers to score the held-out prompts")
        record = evaluate(
            self._hub,
            self._config,
            self._progress.policy,
            waiting=lambda what: self._set_state(LearnerState.EVALUATING, what),
            should_stop=should_stop,
            heartbeat=self._heartbeat,
        )
        if record is None:
            return False
        self._metrics.append(record)
        self._log.info("held-out", policy=str(self._progress.policy), mean_reward=round(record.mean_reward, 4))
        return True

    def _record(
        self, fed: FedBatch, batch: TrainBatch, output: StepOutput, published: Published | None, **seconds: float
    ) -> StepRecord:
        return step_record(
            self._config,
            self._progress.policy,
            fed,
            batch,
            output,
            published,
            full_bytes=self._engine.layout.payload_bytes,
            producers=self._hub_call(self._hub.runs.producers, "to read the producers' status"),
            queue_depth=self._feed.depth(),
            pending=self._watch.pending(),
            elapsed_s=time.monotonic() - self._started_s,
            steps_here=output.step - self._progress.fork_version,
            **seconds,
        )

    def _set_state(self, state: LearnerState, waiting_for: str = "") -> None:
        self._heartbeat()
        if self._publisher is not None and state not in (LearnerState.STOPPED, LearnerState.DONE):
            self._publisher.check()
        self._checkpointing.look()
        for what, detail in (*self._watch.look(), *(self._recorder.look() if self._recorder else ())):
            self._note(what, **detail)
        now = time.monotonic()
        if state is self._state and now - self._reported_s < STATUS_EVERY_S:
            return
        self._state, self._reported_s = state, now
        status = learner_status(
            self._progress, state, waiting_for, step=self._engine.step, steps_total=self._config.learner.steps,
            watch=self._watch, trouble=self._feed.error,
        )  # fmt: skip
        self._hub_call(lambda: self._hub.runs.report_learner(status), "to report status")

    def _still(self, what: str) -> None:
        """In the present state, `what` is waited for."""
        self._set_state(self._state, what)

    def _note(self, what: str, **detail: str | int | float) -> None:
        self._metrics.append(NoteRecord(time_ms=time.time_ns() // 1_000_000, what=what, detail=detail))
        self._log.info(what, **detail)
