"""The producer's loop: permits in, sampled and scored groups out, weights swapped between two engine steps.

Invariant: one thread drives the engine, and waits for no network and for no single rollout. A group is started only under a
permit, only when the version served satisfies the permit, and only while the outbox has room for what is in flight (and its
stream takes groups, where another region could deliver in its place); it ends by its deadline (producers/running_groups.py)
in the outbox, or as a permit that somebody else gets. A swap happens only between steps, so every token's tag names the
weights that sampled it.
Held by tests/unit/producers/test_rollout.py, tests/e2e/test_synchronous.py and tests/e2e/test_survival.py.
"""

from __future__ import annotations

import enum
import os
import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import structlog

from anabranch.producers.engine import Finished, RolloutEngine
from anabranch.producers.evaluation import HeldOut
from anabranch.producers.hub_link import HubLink
from anabranch.producers.outbox import Outbox
from anabranch.producers.prompts import Prompts
from anabranch.producers.running_groups import Ending, RunningGroup, RunningGroups, Sample
from anabranch.producers.swapper import Swapper
from anabranch.producers.weight_follower import WeightFollower
from anabranch.schemas.config import RunConfig
from anabranch.schemas.metrics import ProducerStatus
from anabranch.schemas.trajectory import Group, Rollout

DRAIN_S = 5.0  # how long a stop lets groups in flight run on
IDLE_S = 0.02  # between two looks for permits: short beside a rollout, long beside an idle turn's cost
RATE_WINDOW_S = 10.0


class ProducerState(enum.Enum):
    WAITING_FOR_WEIGHTS = "waiting for weights"
    SAMPLING = "sampling"
    EVALUATING = "evaluating"
    IDLE = "idle"
    DRAINING = "draining"
    DONE = "done"


class RolloutLoop:
    def __init__(
        self,
        engine: RolloutEngine,
        prompts: Prompts,
        follower: WeightFollower,
        link: HubLink,
        outbox: Outbox,
        config: RunConfig,
        *,
        producer: str,
        region: str,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._engine, self._prompts, self._follower, self._link = engine, prompts, follower, link
        self._outbox, self._config, self._producer, self._region = outbox, config, producer, region
        self._other_regions = len(config.regions) > 1
        self._clock_ms = clock_ms
        self._groups = RunningGroups(engine, config, clock_ms=clock_ms)
        self._heldout = HeldOut(engine, prompts, link, config)
        self._draining_since: float | None = None
        self._rate: deque[tuple[float, int]] = deque()
        self._groups_done = 0
        self._swapper = Swapper(engine, follower, config.producer, clock_ms=clock_ms)
        self.state = ProducerState.WAITING_FOR_WEIGHTS
        self._log = structlog.get_logger()

    def run(self, should_stop: Callable[[], bool], heartbeat: Callable[[], None] = lambda: None) -> str:
        """Work until the run is finished or `should_stop()`; returns why it ended."""
        while True:
            if self._link.finished is not None:
                self._put(self._groups.stop(send_partial=False))  # nobody waits for them
                self.state = ProducerState.DONE
                return f"run finished: {self._link.finished}"
            if should_stop() and self._draining_since is None:
                self._draining_since = time.monotonic()
            if self._draining_since is not None and self._drained():
                self.state = ProducerState.DONE
                return "stopped"
            self.turn()
            heartbeat()

    def turn(self) -> None:
        """One engine step and everything around it."""
        self._put(self._groups.turn(lost=self._link.lost(), may_submit=not self._swapper.settling))
        self._heldout.give_up_if_overdue()
        if not self._heldout.busy:
            self._swapper.turn()
        if self._link.verification:
            self._swapper.answer(self._link.verification)
        self._start_groups()
        self._release_appended()
        self._outbox.check()
        self.state = self._state_now()
        if not self._engine.has_unfinished:
            if self._swapper.blocked:
                time.sleep(IDLE_S)
            else:
                self._follower.staged(wait_s=IDLE_S)  # a permit may come at any moment, an update ends the wait
            return
        for finished in self._engine.step():
            self._take_finished(finished)

    def status(self) -> ProducerStatus:
        """Called from the hub link's thread; reads plain attributes only."""
        now = time.monotonic()
        recent = [(t, n) for t, n in list(self._rate) if now - t < RATE_WINDOW_S]
        counts = self._groups.counts
        policy, swapper, serving = self._engine.policy, self._swapper, self._follower.serving
        return ProducerStatus(
            updated_ms=self._clock_ms(),
            region=self._region,
            pid=os.getpid(),
            state=self.state.value,
            policy=str(policy) if policy else "",
            served_since_ms=swapper.served_since_ms,
            tokens_per_s=sum(n for _, n in recent) / RATE_WINDOW_S,
            groups_done=self._groups_done,
            groups_running=len(self._groups),
            groups_partial=counts.groups[Ending.PARTIAL],
            groups_given_up=counts.groups[Ending.GIVEN_UP],
            groups_lost=counts.groups[Ending.LOST],
            rollouts_aborted=counts.rollouts_aborted,
            rollouts_failed=counts.rollouts_failed,
            rollouts_retried=counts.rollouts_retried,
            rollouts_cut=counts.rollouts_cut,
            tokens_cut=counts.tokens_cut,
            groups_spooled=len(self._outbox),
            swaps=swapper.swaps,
            last_swap_pause_ms=swapper.pause_ms,
            publish_to_serve_ms=swapper.publish_to_serve_ms,
            fetched_bytes=self._follower.fetched_bytes,
            last_fetched_bytes=serving.fetched_bytes if serving else 0,
            last_path=", ".join(serving.path) if serving else "",
            following=self._follower.state.value,
            own_weights=self._follower.mirror.alone,
            verified_token=swapper.verified[0],
            verified_policy=swapper.verified[1],
            verified_digest=swapper.verified[2],
            verify_error=swapper.verify_error,
            waiting_for=self._waiting_for(),
            last_error=swapper.error or self._follower.last_error or self._outbox.error or self._link.error,
        )

    def verify_now(self, token: str = "") -> str:
        """Digest of the live engine's weights; errors as `Swapper.verify_now`."""
        return self._swapper.verify_now(token)

    def _start_groups(self) -> None:
        if self._draining_since is not None:
            self._link.want(0, self._engine.policy)
            return
        settling = self._swapper.settling
        if not self._heldout.busy and not len(self._groups) and not self._swapper.busy and not settling:
            self._heldout.start_if_granted()
        config = self._config.producer
        if not self._outbox.accepts or (self._other_regions and self._outbox.held_up):
            self._link.want(0, self._engine.policy)
            self._link.hand_back_granted()  # for as long as groups would only pile up here, they are better off elsewhere
            return
        free = config.groups_in_flight - len(self._groups)
        self._link.want(free + max(1, config.groups_in_flight // 4), self._engine.policy)
        if free <= 0 or settling or self._heldout.busy or self._link.evaluation_waits:
            return
        for permit in self._link.take(free):
            self._groups.start(permit, *self._prompts.training(permit.group_index))

    def _take_finished(self, finished: Finished) -> None:
        self._rate.append((time.monotonic(), len(finished.token_ids)))
        while self._rate and time.monotonic() - self._rate[0][0] > RATE_WINDOW_S:
            self._rate.popleft()
        if not self._heldout.take(finished):
            self._groups.take(finished)

    def _put(self, ended: Iterable[tuple[RunningGroup, Ending]]) -> None:
        for group, ending in ended:
            match ending:
                case Ending.COMPLETE | Ending.PARTIAL:
                    self._outbox.put(self._group(group))
                    self._link.hold(group.index)
                    self._groups_done += 1
                case Ending.GIVEN_UP:
                    self._link.give_up(group.index)
                case Ending.STOPPED:
                    self._link.hand_back(group.index)
                case Ending.LOST:
                    self._link.release(group.index)

    def _release_appended(self) -> None:
        """What is stored needs no permit any more; what still waits does, or somebody else would sample it again. What a
        producer that has gone was at, and is not in its spool, is somebody else's at once."""
        for index in self._outbox.appended():
            self._link.release(index)
        for producer, spooled in self._outbox.adopted():
            self._link.surrender_for(producer, spooled=spooled)

    def _group(self, running: RunningGroup) -> Group:
        return Group(
            run=self._config.run.name,
            region=self._region,
            producer=self._producer,
            group_index=running.index,
            attempt=running.permit.attempt,
            prompt_token_ids=np.asarray(running.prompt_ids, dtype=np.int32),
            prompt_text=running.problem.prompt_text,
            answer=running.problem.answer,
            rollouts=tuple(
                self._rollout(running, sample, done)
                for sample in running.samples
                if (done := sample.finished) is not None
            ),
            group_size=len(running.samples),
            permit_ms=running.permit.granted_ms,
        )

    def _rollout(self, running: RunningGroup, sample: Sample, done: Finished) -> Rollout:
        reward = self._prompts.score(running.problem, done.text)
        return Rollout(
            sample_index=sample.number,
            token_ids=done.token_ids,
            logprobs=done.logprobs,
            spans=done.spans,
            reward=reward,
            finish_reason=done.finish_reason,
            text=done.text,
            started_ms=sample.started_ms,
            finished_ms=sample.finished_ms,
            scored_ms=self._clock_ms(),
        )

    def _drained(self) -> bool:
        """Whether a stop may complete: groups in flight have ended, or their time is up. The outbox is on disk."""
        assert self._draining_since is not None
        self.state = ProducerState.DRAINING
        if len(self._groups) and time.monotonic() - self._draining_since < DRAIN_S:
            return False
        self._put(self._groups.stop(send_partial=True))
        return True

    def _state_now(self) -> ProducerState:
        if self._draining_since is not None:
            return ProducerState.DRAINING
        if self._engine.policy is None:
            return ProducerState.WAITING_FOR_WEIGHTS
        if self._heldout.busy:
            return ProducerState.EVALUATING
        return ProducerState.SAMPLING if self._engine.has_unfinished else ProducerState.IDLE

    def _waiting_for(self) -> str:
        if self._engine.policy is None:
            return "the first weights on the channel"
        if self._swapper.settling and len(self._groups):
            return "running requests to end before the next weights"
        if self._outbox.waiting_for:
            return self._outbox.waiting_for
        if self.state is ProducerState.IDLE:
            wanted = self._link.wants_policy
            return "permits" if wanted is None else f"weights {wanted} or newer, which the permits at hand ask for"
        return ""
