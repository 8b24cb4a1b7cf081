"""A producer's shard of the held-out set, from the grant to the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from anabranch.producers.engine import Finished
from anabranch.producers.environments import Problem
from anabranch.producers.evaluation import HeldOut
from anabranch.schemas.config import load_config
from anabranch.schemas.versions import PolicyVersion, VersionSpan

POLICY = PolicyVersion(1, 3)


class Lab:
    """Engine, prompts and hub link in one; 5 held-out prompts, shard 1 of 2 granted: prompts 1 and 3."""

    def __init__(self) -> None:
        self.submitted: dict[str, tuple[int, float]] = {}
        self.posted: list[tuple[PolicyVersion, int, Any]] = []
        self.grants = [(POLICY, 1, 2)]
        self.aborted: list[str] = []
        self.dropped, self.now_s = 0, 100.0
        config = load_config(overrides=["task.heldout_size=5", "task.heldout_temperature=0"])
        part: Any = self
        self.heldout_part = HeldOut(part, part, part, config, clock=lambda: self.now_s)

    def take_evaluation(self) -> tuple[PolicyVersion, int, int] | None:
        return self.grants.pop() if self.grants else None

    def post_evaluation(self, policy: PolicyVersion, shard: int, result: Any) -> None:
        self.posted.append((policy, shard, result))

    def drop_evaluation(self) -> None:
        self.dropped += 1

    def abort(self, request_ids: Sequence[str]) -> dict[str, int]:
        self.aborted += request_ids
        return {}

    def heldout(self, index: int) -> tuple[Problem, Sequence[int]]:
        return cast(Any, str(index)), [index]

    def score(self, problem: Any, text: str) -> float:
        return float(text == problem)

    def submit(self, request_id: str, prompt_ids: Sequence[int], *, seed: int, temperature: float) -> None:
        self.submitted[request_id] = (seed, temperature)

    def finish(self, request_id: str, text: str, reason: str = "stop") -> bool:
        spans = (VersionSpan(POLICY, 0),)
        one = np.zeros(1, np.int32)
        return self.heldout_part.take(Finished(request_id, one, one.astype(np.float32), spans, reason, text))


def test_a_shard_is_posted_when_its_last_prompt_is_scored_in_the_order_of_the_prompts() -> None:
    lab = Lab()
    lab.heldout_part.start_if_granted()
    assert sorted(lab.submitted) == ["heldout.1", "heldout.3"]
    assert {temperature for _, temperature in lab.submitted.values()} == {0.0}
    assert len({seed for seed, _ in lab.submitted.values()}) == 2
    assert lab.finish("heldout.3", "3")
    assert lab.heldout_part.busy
    assert not lab.posted
    assert lab.finish("heldout.1", "wrong")
    assert lab.posted == [(POLICY, 1, {"rewards": [0.0, 1.0]})]
    assert not lab.heldout_part.busy


def test_requests_of_others_are_not_its_own() -> None:
    lab = Lab()
    assert not lab.finish("7.0", "x")
    lab.heldout_part.start_if_granted()
    assert not lab.finish("7.0", "x")


def test_without_a_grant_nothing_starts() -> None:
    lab = Lab()
    lab.grants = []
    lab.heldout_part.start_if_granted()
    assert not lab.submitted
    assert not lab.heldout_part.busy


def test_a_shard_that_cannot_be_finished_is_left_to_others() -> None:
    lab = Lab()
    lab.heldout_part.start_if_granted()
    lab.finish("heldout.1", "1")
    assert lab.finish("heldout.3", "", "error")
    assert (lab.heldout_part.busy, lab.aborted, lab.dropped, lab.posted) == (False, ["heldout.3"], 1, [])


def test_a_shard_takes_no_longer_than_the_learner_waits() -> None:
    lab = Lab()
    lab.heldout_part.give_up_if_overdue()
    lab.heldout_part.start_if_granted()
    lab.now_s += 299
    lab.heldout_part.give_up_if_overdue()
    assert lab.heldout_part.busy
    lab.now_s += 2
    lab.heldout_part.give_up_if_overdue()
    assert (lab.heldout_part.busy, sorted(lab.aborted), lab.dropped) == (False, ["heldout.1", "heldout.3"], 1)
