"""The producer's part in a held-out evaluation: one shard at a time, under the weights that were asked for.

Invariant: while a shard is under way the engine works on nothing else and its weights are not swapped, so every reward
of the result is that of the policy asked for. A shard ends: with its result, or by `learner.evaluate_deadline_s` (nobody waits
for it any longer), or when the engine gives one of its requests up; then its lease runs out and it is somebody's again.
Held by tests/unit/producers/test_evaluation.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from anabranch.producers.engine import Finished, RolloutEngine
from anabranch.producers.environments import Problem
from anabranch.producers.hub_link import HubLink
from anabranch.producers.prompts import Prompts, sample_seed
from anabranch.schemas.config import RunConfig
from anabranch.schemas.versions import PolicyVersion


@dataclass(slots=True)
class _Shard:
    policy: PolicyVersion
    number: int
    problems: dict[str, Problem]
    started_s: float
    rewards: dict[str, float] = field(default_factory=dict)


class HeldOut:
    """`busy` from the moment a shard's requests are with the engine until its result is posted."""

    def __init__(
        self,
        engine: RolloutEngine,
        prompts: Prompts,
        link: HubLink,
        config: RunConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._prompts, self._link, self._config, self._clock = engine, prompts, link, config, clock
        self._shard: _Shard | None = None
        self._log = structlog.get_logger()

    @property
    def busy(self) -> bool:
        return self._shard is not None

    def start_if_granted(self) -> None:
        """Submit the shard that the hub has granted, if any; call it when the engine has nothing else to do."""
        granted = self._link.take_evaluation()
        if granted is None:
            return
        policy, number, shards = granted
        task = self._config.task
        problems: dict[str, Problem] = {}
        for index in range(number, task.heldout_size, shards):
            problem, prompt_ids = self._prompts.heldout(index)
            request = f"heldout.{index}"
            problems[request] = problem
            seed = sample_seed(self._config.run.seed, "heldout", index, 0)
            self._engine.submit(request, prompt_ids, seed=seed, temperature=task.heldout_temperature)
        self._shard = _Shard(policy, number, problems, self._clock())

    def take(self, finished: Finished) -> bool:
        """Score a finished request, and post the result with the last one. False if it is none of the shard's."""
        shard = self._shard
        if shard is None or finished.request_id not in shard.problems:
            return False
        if not finished.complete:
            self._give_up(shard, f"the engine ended {finished.request_id} with {finished.finish_reason!r}")
            return True
        shard.rewards[finished.request_id] = self._prompts.score(shard.problems[finished.request_id], finished.text)
        if len(shard.rewards) == len(shard.problems):
            rewards = [shard.rewards[request] for request in shard.problems]
            self._link.post_evaluation(shard.policy, shard.number, {"rewards": rewards})
            self._shard = None
        return True

    def give_up_if_overdue(self) -> None:
        """End a shard that takes longer than the learner waits."""
        limit_s = self._config.learner.evaluate_deadline_s
        if self._shard is not None and self._clock() - self._shard.started_s > limit_s:
            self._give_up(self._shard, f"learner.evaluate_deadline_s = {limit_s} has passed")

    def _give_up(self, shard: _Shard, why: str) -> None:
        self._log.error("evaluation shard given up", shard=shard.number, policy=str(shard.policy), why=why)
        self._engine.abort([request for request in shard.problems if request not in shard.rewards])
        self._shard = None
        self._link.drop_evaluation()
