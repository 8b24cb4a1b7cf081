"""The producer's loop: what it starts, what it waits for, what it reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.producers.engine import EngineState
from anabranch.producers.rollout import ProducerState, RolloutLoop
from anabranch.producers.weight_follower import FollowerState, Staged
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.permits import Permit

SERVED = Staged(PolicyVersion(1, 2), "0" * 32, {}, 70, ("anchor e1.v0", "skip2 e1.v2"), 0, 1)
NEXT = Staged(PolicyVersion(1, 3), "1" * 32, {}, 7, ("delta e1.v3",), 0, 2)


class Follower:
    def __init__(self) -> None:
        self.offer: Staged | None = None
        self.serving: Staged | None = SERVED
        self.last_error, self.fetched_bytes, self.state = "", 99, FollowerState.POLLING
        self.mirror = SimpleNamespace(alone="")

    def staged(self, *, wait_s: float = 0.0) -> Staged | None:
        return self.offer

    def hold(self) -> Staged | None:
        return self.offer

    def reject(self, staged: Staged, reason: str) -> None:
        self.offer = None


class Outbox:
    error = ""

    def __len__(self) -> int:
        return 0

    def flush(self) -> list[int]:
        return []


class World:
    """A loop whose engine runs what is started for ever, and refuses every swap."""

    def __init__(self, kv_policy: str = "keep") -> None:
        self.submitted: list[str] = []
        self.engine = SimpleNamespace(
            state=EngineState.SERVING,
            policy=PolicyVersion(1, 2),
            has_unfinished=False,
            submit=lambda request_id, *_, **__: self.submitted.append(request_id),
            step=list,
            prepare=lambda *_: True,
            swap=self._refuse,
            live_digest=lambda: "0" * 32,
        )
        self.follower = Follower()
        self.permits = [Permit(i, 0, PolicyVersion(1, 0)) for i in range(9)]
        self.link = SimpleNamespace(
            want=lambda *_: None,
            take=lambda n: [self.permits.pop(0) for _ in range(n)],
            take_evaluation=lambda: None,
            evaluation_waits=False,
            verification=None,
            error="",
            lost=lambda: set(),
            wants_policy=None,
        )
        prompts = SimpleNamespace(training=lambda index: (None, [1, 2, 3]))
        config = RunConfig.model_validate({"producer": {"kv_policy": kv_policy, "groups_in_flight": 2}})
        parts: Any = self.engine, prompts, self.follower, self.link, Outbox()
        self.loop = RolloutLoop(*parts, config, producer="p", region="local")

    def _refuse(self, *_: object) -> None:
        raise DeltaError("an index is out of range")


def test_a_refused_swap_is_reported_and_sampling_goes_on() -> None:
    world = World()
    world.follower.offer = NEXT
    world.loop.turn()
    assert world.loop.status().last_error == "swap to e1.v3 refused: an index is out of range"
    assert world.submitted, "groups are started under the old version"


def test_under_new_requests_only_no_group_starts_while_an_update_waits() -> None:
    world = World("new_requests_only")
    world.loop.turn()
    world.engine.has_unfinished = True
    started = len(world.submitted)
    assert started
    world.follower.offer = NEXT
    world.loop._running.pop(0)  # one of two groups has ended
    world.loop.turn()
    assert len(world.submitted) == started
    assert world.loop.status().waiting_for == "running requests to end before the next weights"
    world.follower.offer = None
    world.loop.turn()
    assert len(world.submitted) > started


def test_a_request_to_verify_is_answered_once() -> None:
    world = World()
    world.link.verification = "token"
    world.loop.turn()
    status = world.loop.status()
    assert (status.verified_token, status.verified_policy, status.verified_digest) == ("token", "e1.v2", "0" * 32)
    world.engine.live_digest = lambda: pytest.fail("asked twice")
    world.loop.turn()


def test_its_state_says_whether_it_samples_or_idles() -> None:
    world = World()
    world.link.take = lambda n: []
    world.loop.turn()
    assert (world.loop.state, world.loop.status().waiting_for) == (ProducerState.IDLE, "permits")
    world.link.wants_policy = PolicyVersion(2, 9)
    assert world.loop.status().waiting_for == "weights e2.v9 or newer, which the permits at hand ask for"
    world.engine.has_unfinished = True
    world.loop.turn()
    assert (world.loop.state, world.loop.status().waiting_for) == (ProducerState.SAMPLING, "")


def test_status_says_how_the_served_weights_came() -> None:
    status = World().loop.status()
    assert (status.fetched_bytes, status.last_fetched_bytes) == (99, 70)
    assert status.last_path == "anchor e1.v0, skip2 e1.v2"
    assert (status.following, status.own_weights) == ("polling", "")
