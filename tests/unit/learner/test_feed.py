"""The feed over in-memory streams: everything that arrives ends as trained, dropped(cause) or pending, across crashes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anabranch.consumers.reader import Reader
from anabranch.learner.feed import TRAINED, Feed
from anabranch.schemas.config import StreamSection
from anabranch.schemas.envelope import Envelope
from anabranch.schemas.errors import BackpressureError, DeadlineError, StreamUnavailableError
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.schemas.trajectory import Group, Rollout, encode_group
from anabranch.schemas.versions import PolicyVersion, VersionSpan
from anabranch.transport.memory_permits import MemoryPermits
from anabranch.transport.memory_stream import MemoryStream, MemoryStreamStore
from anabranch.transport.permits import Permit

BATCH = 4
MAX_AGE = 2


def group(index: int, version: int, *, epoch: int = 1, region: str = "east") -> Group:
    rollouts = tuple(
        Rollout(
            sample_index=s,
            token_ids=np.array([1, 2], np.int32),
            logprobs=np.array([-1.0, -0.5], np.float32),
            spans=(VersionSpan(PolicyVersion(epoch, version), 0),),
            reward=float(s % 2),
            finish_reason="stop",
            text="x",
            started_ms=0,
            finished_ms=1,
        )
        for s in range(2)
    )
    return Group("run", region, "p", index, 0, np.array([5], np.int32), "q", "a", rollouts)


class World:
    """Two regions, one hub; `learner()` is a fresh start of the learner, from `state` if given."""

    def __init__(self) -> None:
        self.stores = {name: MemoryStreamStore() for name in ("east", "west")}
        self.now_ms = 0.0
        self.permits = MemoryPermits("run", clock_ms=lambda: self.now_ms)
        self.seq = 0

    def learner(
        self, state: dict[str, Any] | None = None, *, version: int = 0, epoch: int = 1, total: int = 100
    ) -> Feed:
        streams = {name: MemoryStream(store) for name, store in self.stores.items()}
        reader = Reader(streams, run="run", group=LEARNER_GROUP, consumer="learner-0", config=StreamSection(block_ms=4))
        feed = Feed(
            reader,
            streams,
            self.permits,
            batch_groups=BATCH,
            max_age=MAX_AGE,
            block_ms=4,
            hub_deadline_s=1,
            resumed=state,
        )
        if state is not None:
            feed.checkpointed()
        self.permits.reset(
            epoch=epoch, version=version, batch=BATCH, max_age=MAX_AGE, total=total, accepted=feed.drain_backlog()
        )
        return feed

    def take(self, count: int) -> list[Permit]:
        return self.permits.take("p", max_groups=count, lease_ms=60_000)

    def produce(self, index: int, version: int, region: str = "east", epoch: int = 1) -> None:
        self.seq += 1
        payload = encode_group(group(index, version, epoch=epoch, region=region))
        MemoryStream(self.stores[region]).append(Envelope("p", self.seq, index, payload))

    def ledger(self, region: str) -> dict[str, int]:
        counts = MemoryStream(self.stores[region]).ledger(LEARNER_GROUP)
        assert counts.balanced
        return {"produced": counts.produced, "pending": counts.pending, **counts.fates}


def indices(batch: Any) -> list[int]:
    return [a.group.group_index for a in batch.arrivals]


def consume(feed: Feed, batch: Any) -> None:
    feed.consumed({(a.region, a.entry_id): TRAINED for a in batch.arrivals})


@pytest.fixture
def world() -> World:
    return World()


def next_batch(feed: Feed, version: int = 0, epoch: int = 1, fork: int = 0, deadline_s: float = 5.0) -> Any:
    return feed.next_batch(PolicyVersion(epoch, version), {1: 0, epoch: fork}, deadline_s=deadline_s)


def test_a_batch_mixes_regions_and_is_acknowledged_only_after_a_checkpoint(world: World) -> None:
    feed = world.learner()
    for permit in world.take(BATCH):
        world.produce(permit.group_index, 0, region=["east", "west"][permit.group_index % 2])
    batch = next_batch(feed)
    assert indices(batch) == [0, 1, 2, 3]
    consume(feed, batch)
    assert world.ledger("east") == {"produced": 2, "pending": 2}
    assert feed.checkpointed() == BATCH
    assert world.ledger("east") == {"produced": 2, "pending": 0, "trained": 2}
    assert world.ledger("west") == {"produced": 2, "pending": 0, "trained": 2}


def test_the_lowest_group_indices_go_first_and_a_straggler_holds_nothing(world: World) -> None:
    feed = world.learner()
    world.take(12)
    for index in (7, 3, 9, 1, 5):
        world.produce(index, 0)
    assert indices(next_batch(feed)) == [1, 3, 5, 7]


def test_an_old_group_is_dropped_and_its_permit_handed_out_again(world: World) -> None:
    feed = world.learner()
    world.take(BATCH)
    for index in range(BATCH):
        world.produce(index, 0)
    with pytest.raises(DeadlineError, match="4 more groups of 4"):
        next_batch(feed, version=MAX_AGE + 1, deadline_s=0.05)
    assert world.ledger("east") == {"produced": 4, "pending": 0, "dropped:age": 4}
    again = world.take(BATCH)
    assert [(p.group_index, p.attempt) for p in again] == [(i, 1) for i in range(4)]


def test_a_crash_before_the_checkpoint_trains_the_same_groups_again(world: World) -> None:
    feed = world.learner()
    state = feed.state()
    world.take(BATCH)
    for index in range(BATCH):
        world.produce(index, 0)
    consume(feed, next_batch(feed))
    resumed = world.learner(state, epoch=2)
    assert indices(next_batch(resumed, epoch=2)) == [0, 1, 2, 3]


def test_a_crash_between_checkpoint_and_acknowledgement_trains_nothing_twice(world: World) -> None:
    feed = world.learner()
    world.take(2 * BATCH)
    for index in range(2 * BATCH):
        world.produce(index, 0)
    consume(feed, next_batch(feed))
    state = feed.state()  # durable, but the learner dies before it acknowledges
    resumed = world.learner(state, version=1, epoch=2)
    assert world.ledger("east")["trained"] == BATCH
    batch = next_batch(resumed, version=1, epoch=2, fork=1)
    assert indices(batch) == [4, 5, 6, 7]
    consume(resumed, batch)
    resumed.checkpointed()
    assert world.ledger("east") == {"produced": 8, "pending": 0, "trained": 8}


def test_permits_of_lost_groups_come_back_after_a_resume(world: World) -> None:
    feed = world.learner()
    world.take(BATCH)
    for index in (0, 1):
        world.produce(index, 0)
    state = feed.state()
    world.now_ms = 1e15  # every lease has run out
    world.learner(state, epoch=2)
    assert [p.group_index for p in world.take(BATCH)] == [2, 3, 4, 5]


def test_a_second_entry_of_the_same_group_is_dropped_as_duplicate(world: World) -> None:
    feed = world.learner()
    world.take(BATCH)
    for index in (0, 0, 1, 2, 3):
        world.produce(index, 0)
    assert indices(next_batch(feed)) == [0, 1, 2, 3]
    assert world.ledger("east") == {"produced": 5, "pending": 4, "dropped:duplicate": 1}


def test_groups_of_a_sibling_line_count_their_distance_through_the_fork(world: World) -> None:
    feed = world.learner(version=1, epoch=2)  # forked at 1; the dead learner had gone on to 2 and 4
    world.take(8)
    for index in range(BATCH):
        world.produce(index, 2, epoch=1)  # distance 1
    world.produce(4, 4, epoch=1)  # distance 3: beyond the bound
    assert indices(next_batch(feed, version=1, epoch=2, fork=1)) == [0, 1, 2, 3]
    assert world.ledger("east")["dropped:age"] == 1


def test_a_group_that_claims_weights_of_the_future_is_dropped_and_sampled_again(world: World) -> None:
    feed = world.learner()
    world.take(BATCH + 1)
    world.produce(0, 3)
    world.produce(1, 0, epoch=9)
    for index in range(2, BATCH + 2):
        world.produce(index, 0)
    assert indices(next_batch(feed)) == [2, 3, 4, 5]
    assert world.ledger("east")["dropped:false_version"] == 2
    assert [p.group_index for p in world.take(2)] == [0, 1]


@pytest.mark.parametrize("error", [StreamUnavailableError, BackpressureError])
def test_a_region_that_is_away_or_full_at_acknowledgement_is_acknowledged_later(
    world: World, error: type[Exception]
) -> None:
    feed = world.learner()
    world.take(BATCH)
    for index in range(BATCH):
        world.produce(index, 0, region=["east", "west"][index % 2])
    consume(feed, next_batch(feed))
    west = feed._streams["west"]  # the learner's own handle: cut only its connection
    real, cut = west.settle, [True]

    def settle(group_name: str, fates: Any) -> int:
        if cut[0]:
            raise error("west")
        return real(group_name, fates)

    west.settle = settle  # type: ignore[method-assign]
    assert feed.checkpointed() == 2
    cut[0] = False
    assert feed.checkpointed() == 2
    assert world.ledger("west") == {"produced": 2, "pending": 0, "trained": 2}


@pytest.mark.parametrize("error", [StreamUnavailableError, BackpressureError])
def test_what_is_dropped_while_its_region_is_away_is_settled_when_it_is_back(
    world: World, error: type[Exception]
) -> None:
    feed = world.learner()
    world.take(2 * BATCH)
    for index in range(BATCH):
        world.produce(index, 0, region="west")
    feed.drain_backlog()
    west = feed._streams["west"]
    real, calls = west.settle, []

    def settle(group_name: str, fates: Any) -> int:
        calls.append(len(fates))
        if len(calls) == 1:
            raise error("west")
        return real(group_name, fates)

    west.settle = settle  # type: ignore[method-assign]
    with pytest.raises(DeadlineError):
        next_batch(feed, version=MAX_AGE + 1, deadline_s=0.05)
    assert calls == [BATCH], "one time-out for all of them, not one each"
    assert world.ledger("west")["pending"] == BATCH
    assert feed.checkpointed() == BATCH
    assert world.ledger("west") == {"produced": 4, "pending": 0, "dropped:age": 4}


def test_what_arrives_while_a_batch_is_ready_is_seen_before_its_lease_runs_out(world: World) -> None:
    """A producer renews no lease of a group that is stored: unseen, it would be sampled a second time."""
    feed = world.learner()
    world.take(3 * BATCH)
    for index in range(2 * BATCH):
        world.produce(index, 0)
    consume(feed, next_batch(feed))
    assert feed.queued == BATCH
    for index in range(2 * BATCH, 3 * BATCH):
        world.produce(index, 0)
    consume(feed, next_batch(feed))
    world.now_ms += 61_000
    assert world.take(BATCH) == []


def test_what_is_left_at_the_end_is_dropped_as_surplus(world: World) -> None:
    feed = world.learner()
    world.take(BATCH + 2)
    for index in range(BATCH + 2):
        world.produce(index, 0)
    consume(feed, next_batch(feed))
    feed.checkpointed()
    assert feed.drop_surplus() == 2
    assert world.ledger("east") == {"produced": 6, "pending": 0, "trained": 4, "dropped:surplus": 2}
