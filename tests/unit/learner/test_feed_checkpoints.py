"""A checkpoint that becomes durable while the feed goes on: what it holds is settled, what came since waits for the next."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.feeds import BATCH, FeedWorld, train


@pytest.fixture
def world(tmp_path: Path) -> Iterator[FeedWorld]:
    made = FeedWorld(tmp_path)
    yield made
    made.die()


def produce(world: FeedWorld, count: int) -> None:
    for permit in world.take(count):
        world.produce(permit.group_index, 0)


def logged(world: FeedWorld) -> list[int]:
    return [record.group_index for record in world.log()]


def test_what_was_consumed_since_waits_for_the_next_one(world: FeedWorld) -> None:
    feed = world.learner()
    produce(world, 2 * BATCH)
    first = train(feed)
    state = json.loads(json.dumps(feed.state()))
    second = train(feed, version=1)
    feed.checkpointed(state)
    assert logged(world) == first
    assert world.ledger("east") == {"produced": 2 * BATCH, "pending": BATCH, "trained": BATCH}
    feed.checkpointed(state)  # told again: nothing more
    assert logged(world) == first
    newer = feed.state()
    assert {e["record"]["group_index"] for e in newer["to_settle"]} >= set(second)
    feed.checkpointed(newer)
    assert logged(world) == first + second
    assert world.ledger("east") == {"produced": 2 * BATCH, "pending": 0, "trained": 2 * BATCH}


def test_a_crash_before_it_is_durable_trains_again_what_it_would_have_held(world: FeedWorld) -> None:
    feed = world.learner()
    produce(world, 2 * BATCH)
    first = train(feed)
    durable = feed.state()
    feed.checkpointed(durable)
    second = train(feed, version=1)
    feed.state()  # a checkpoint that was begun
    resumed = world.learner(durable, version=1, epoch=2)
    assert train(resumed, version=1, epoch=2, fork=1) == second
    resumed.checkpointed()
    assert logged(world) == first + second


def test_a_crash_after_it_is_durable_settles_what_it_holds_and_trains_again_what_came_since(world: FeedWorld) -> None:
    feed = world.learner()
    produce(world, 2 * BATCH)
    first = train(feed)
    durable = json.loads(json.dumps(feed.state()))
    second = train(feed, version=1)
    resumed = world.learner(durable, version=1, epoch=2)
    resumed.checkpointed()
    assert logged(world) == first
    assert train(resumed, version=1, epoch=2, fork=1) == second
    resumed.checkpointed(resumed.state())
    assert logged(world) == first + second
    assert world.ledger("east") == {"produced": 2 * BATCH, "pending": 0, "trained": 2 * BATCH}
