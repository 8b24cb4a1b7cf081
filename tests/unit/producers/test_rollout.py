"""The producer's loop: what it starts, what it waits for, what it reports, and what becomes of a group."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anabranch.producers import rollout
from anabranch.producers.engine import EngineState, Finished
from anabranch.producers.rollout import ProducerState, RolloutLoop
from anabranch.producers.weight_follower import FollowerState, Staged
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import DeadlineError, DeltaError, RewardError
from anabranch.schemas.trajectory import Group, decode_group, encode_group
from anabranch.schemas.versions import PolicyVersion, VersionSpan
from anabranch.transport.permits import Permit

SERVED = Staged(PolicyVersion(1, 2), "0" * 32, {}, 70, ("anchor e1.v0", "skip2 e1.v2"), 0, 1)
NEXT = Staged(PolicyVersion(1, 3), "1" * 32, {}, 7, ("delta e1.v3",), 0, 2)
SIZE = 4


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
    def __init__(self) -> None:
        self.error = self.waiting_for = ""
        self.accepts, self.held_up = True, False
        self.groups: list[Group] = []
        self.stored: list[int] = []
        self.neighbours: list[tuple[str, list[int]]] = []
        self.failure: Exception | None = None

    def __len__(self) -> int:
        return len(self.groups)

    def put(self, group: Group) -> None:
        self.groups.append(decode_group(encode_group(group)))

    def appended(self) -> list[int]:
        stored, self.stored = self.stored, []
        return stored

    def adopted(self) -> list[tuple[str, list[int]]]:
        neighbours, self.neighbours = self.neighbours, []
        return neighbours

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure


class Engine:
    """Runs what is started until the test finishes it, and refuses every swap."""

    def __init__(self) -> None:
        self.state, self.policy = EngineState.SERVING, PolicyVersion(1, 2)
        self.live_digest = lambda: "0" * 32
        self.submitted: list[str] = []
        self.running: list[str] = []
        self.finishing: list[Finished] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running)

    def submit(self, request_id: str, prompt: object, *, seed: int) -> None:
        self.submitted.append(request_id)
        self.running.append(request_id)

    def step(self) -> list[Finished]:
        done, self.finishing = self.finishing, []
        return done

    def finish(self, *names: str, reason: str = "stop") -> None:
        """Requests whose id begins with one of `names`."""
        for request_id in [r for r in self.running if r.startswith(names)]:
            self.running.remove(request_id)
            spans = (VersionSpan(PolicyVersion(1, 2), 0),)
            one = np.ones(1, np.int32)
            self.finishing.append(Finished(request_id, one, np.zeros(1, np.float32), spans, reason, "x"))
        self.running = self.running or ["other"]  # so that the loop steps

    def abort(self, request_ids: Iterable[str]) -> dict[str, int]:
        gone = {r: 1 for r in request_ids if r in self.running}
        self.running = [r for r in self.running if r not in gone]
        return gone

    def prepare(self, *_: object) -> bool:
        return True

    def swap(self, *_: object) -> None:
        raise DeltaError("an index is out of range")


class World:
    def __init__(
        self,
        kv_policy: str = "keep",
        *,
        groups: int = 2,
        min_group_size: int | None = 2,
        regions: tuple[str, ...] = ("a",),
    ) -> None:
        self.engine, self.follower, self.outbox = Engine(), Follower(), Outbox()
        self.permits = [Permit(i, 0, PolicyVersion(1, 0), granted_ms=100 + i) for i in range(9)]
        self.told: list[tuple[str, int]] = []
        self.surrendered: list[tuple[str, list[int]]] = []
        self.wanted = 0
        self.times_ms = itertools.count(1_000)
        self.link = SimpleNamespace(
            want=lambda n, _: setattr(self, "wanted", n),
            take=lambda n: [self.permits.pop(0) for _ in range(n)],
            take_evaluation=lambda: None,
            evaluation_waits=False,
            verification=None,
            finished=None,
            error="",
            lost=lambda: set(),
            wants_policy=None,
            surrender_for=lambda producer, *, spooled: self.surrendered.append((producer, spooled)),
            hand_back_granted=lambda: self.told.append(("hand_back_granted", -1)),
            **{
                name: lambda index, name=name: self.told.append((name, index))
                for name in ("hold", "release", "give_up", "hand_back")
            },
        )
        self.score: Any = lambda problem, text: 1.0
        problem = SimpleNamespace(prompt_text="?", answer="x")
        prompts = SimpleNamespace(
            training=lambda index: (problem, [1, 2, 3]), score=lambda problem, text: self.score(problem, text)
        )
        config = RunConfig.model_validate(
            {
                "producer": {"kv_policy": kv_policy, "groups_in_flight": groups},
                "sampling": {"group_size": SIZE, "min_group_size": min_group_size},
                "regions": {name: {"url": "redis://127.0.0.1:1/0"} for name in regions},
            }
        )
        parts: Any = self.engine, prompts, self.follower, self.link, self.outbox
        self.loop = RolloutLoop(*parts, config, producer="p", region="local", clock_ms=lambda: next(self.times_ms))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What `time.monotonic` says, in a list of one."""
    now = [1000.0]
    clocks = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: None, time_ns=lambda: 0)
    monkeypatch.setattr(rollout, "time", clocks)
    return now


def test_a_finished_group_is_put_and_keeps_its_lease_until_the_stream_has_it() -> None:
    world = World(groups=1)
    world.loop.turn()
    world.engine.finish("0.")
    world.loop.turn()
    world.loop.turn()
    (group,) = world.outbox.groups
    assert (group.group_index, group.group_size, group.partial, len(group.rollouts)) == (0, SIZE, False, SIZE)
    assert world.told == [("hold", 0)]
    assert world.engine.submitted[SIZE].startswith("1."), "the next one has begun"
    world.outbox.stored = [0]
    world.loop.turn()
    assert world.told == [("hold", 0), ("release", 0)]


def test_a_group_says_when_its_permit_came_and_each_reward_was_there() -> None:
    world = World(groups=1)
    scored: list[int] = []

    def score(problem: Any, text: str) -> float:
        scored.append(next(world.times_ms))
        return 1.0

    world.score = score
    world.loop.turn()
    world.engine.finish("0.")
    world.loop.turn()
    world.loop.turn()
    (group,) = world.outbox.groups
    assert group.permit_ms == 100
    assert [r.scored_ms for r in group.rollouts] == [ms + 1 for ms in scored], "the look at the clock that follows"
    assert all(r.started_ms < r.finished_ms < r.scored_ms for r in group.rollouts)


def test_what_a_producer_that_has_gone_was_at_is_handed_out_again_when_its_spool_is_adopted() -> None:
    world = World()
    world.outbox.neighbours = [("east-00-dead", [4, 7])]
    world.loop.turn()
    world.loop.turn()
    assert world.surrendered == [("east-00-dead", [4, 7])]


def test_a_partial_group_says_what_was_asked_for() -> None:
    world = World(groups=1)
    world.loop.turn()
    world.engine.finish("0.1", "0.3")
    world.loop.turn()
    for _ in range(8):
        world.engine.finish("0.0", "0.2", reason="error")
        world.loop.turn()
    (group,) = world.outbox.groups
    assert (group.group_size, group.partial, [r.sample_index for r in group.rollouts]) == (SIZE, True, [1, 3])
    status = world.loop.status()
    assert (status.groups_partial, status.rollouts_failed, status.rollouts_cut, status.groups_spooled) == (1, 6, 2, 1)


def test_what_cannot_be_finished_is_given_up_and_what_is_lost_is_released() -> None:
    world = World()
    world.loop.turn()
    world.link.lost = lambda: {1}
    for _ in range(8):
        world.engine.finish("0.", reason="error")
        world.loop.turn()
    assert set(world.told) == {("give_up", 0), ("release", 1)}
    assert (world.loop.status().groups_given_up, world.loop.status().groups_lost) == (1, 1)
    assert not world.outbox.groups


def test_a_full_spool_starts_nothing_finishes_what_runs_and_says_so() -> None:
    world = World(groups=1)
    world.loop.turn()
    world.outbox.accepts, world.outbox.waiting_for = False, "the disk of the spool: no space left"
    started = len(world.engine.submitted)
    world.engine.finish("0.")
    for _ in range(3):
        world.loop.turn()
    assert len(world.outbox.groups) == 1
    assert (len(world.engine.submitted), world.wanted) == (started, 0)
    assert ("hand_back_granted", -1) in world.told, "others may have what waits here"
    assert world.loop.status().waiting_for == "the disk of the spool: no space left"
    world.outbox.accepts = True
    world.loop.turn()
    assert len(world.engine.submitted) > started
    world.outbox.failure = DeadlineError("gave up waiting for the disk")
    with pytest.raises(DeadlineError, match="the disk"):
        world.loop.turn()


@pytest.mark.parametrize("regions", [("a",), ("a", "b")])
def test_while_its_region_takes_nothing_permits_are_left_to_other_regions_if_there_are_any(
    regions: tuple[str, ...],
) -> None:
    """Else a region whose Redis is gone would sit on every permit there is, and the learner would wait for it."""
    world = World(groups=1, regions=regions)
    world.loop.turn()
    world.outbox.held_up = True
    started = len(world.engine.submitted)
    world.engine.finish("0.")
    for _ in range(3):
        world.loop.turn()
    assert len(world.outbox.groups) == 1, "what runs is finished and spooled"
    goes_on = len(regions) == 1
    assert (len(world.engine.submitted) > started, world.wanted > 0) == (goes_on, goes_on)
    assert (("hand_back_granted", -1) in world.told) is not goes_on
    world.outbox.held_up = False
    world.loop.turn()
    assert len(world.engine.submitted) > started


def test_a_scorer_that_fails_ends_the_process() -> None:
    world = World(groups=1)
    world.loop.turn()

    def broken(*_: object) -> float:
        raise RewardError("no finite number")

    world.score = broken
    world.engine.finish("0.")
    world.loop.turn()
    with pytest.raises(RewardError):
        world.loop.turn()


def test_a_stop_lets_groups_end_for_a_while_and_waits_for_no_network(clock: list[float]) -> None:
    world = World()
    world.loop.turn()
    started = len(world.engine.submitted)
    world.outbox.error = "region local is away"
    stop = [False, True]

    def turns() -> None:
        clock[0] += 2
        if clock[0] == 1004:
            world.engine.finish("0.", "1.0", "1.1")

    assert world.loop.run(lambda: stop.pop() if len(stop) > 1 else True, heartbeat=turns) == "stopped"
    assert 1000 + rollout.DRAIN_S <= clock[0] <= 1008
    assert [(g.group_index, g.partial) for g in world.outbox.groups] == [(0, False), (1, True)]
    assert (len(world.engine.submitted), world.loop.state) == (started, ProducerState.DONE)
    assert world.wanted == 0


def test_a_stop_ends_at_once_when_nothing_runs_and_hands_back_what_cannot_be_sent(clock: list[float]) -> None:
    world = World(min_group_size=None)
    world.loop.turn()
    assert world.loop.run(lambda: True, heartbeat=lambda: clock.__setitem__(0, clock[0] + 2)) == "stopped"
    assert world.told == [("hand_back", 0), ("hand_back", 1)]
    before = clock[0]
    assert world.loop.run(lambda: True) == "stopped"
    assert clock[0] == before


def test_at_the_end_of_the_run_stragglers_hold_nobody() -> None:
    world = World()
    world.loop.turn()
    world.engine.finish("0.0", "0.1", "0.2")
    world.loop.turn()
    world.link.finished = "all steps done"
    assert world.loop.run(lambda: False) == "run finished: all steps done"
    assert (world.outbox.groups, [r for r in world.engine.running if r != "other"]) == ([], [])


def test_a_refused_swap_is_reported_and_sampling_goes_on() -> None:
    world = World()
    world.follower.offer = NEXT
    world.loop.turn()
    assert world.loop.status().last_error == "swap to e1.v3 refused: an index is out of range"
    assert world.engine.submitted, "groups are started under the old version"


def test_under_new_requests_only_no_group_starts_while_an_update_waits() -> None:
    world = World("new_requests_only")
    world.loop.turn()
    started = len(world.engine.submitted)
    assert started
    world.follower.offer = NEXT
    world.engine.finish("0.")
    world.loop.turn()
    world.loop.turn()
    assert len(world.outbox.groups) == 1
    assert len(world.engine.submitted) == started
    assert world.loop.status().waiting_for == "running requests to end before the next weights"
    world.follower.offer = None
    world.loop.turn()
    assert len(world.engine.submitted) > started


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
    world.engine.running = ["other"]
    world.loop.turn()
    assert (world.loop.state, world.loop.status().waiting_for) == (ProducerState.SAMPLING, "")


def test_status_says_how_the_served_weights_came() -> None:
    status = World().loop.status()
    assert (status.fetched_bytes, status.last_fetched_bytes) == (99, 70)
    assert status.last_path == "anchor e1.v0, skip2 e1.v2"
    assert (status.following, status.own_weights) == ("polling", "")
