"""What comes a second time, from a server that forgot its last second or from somebody who copies, has one fate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_stream import MemoryStream
from tests.feeds import BATCH, MAX_AGE, FeedWorld, begin, train
from tests.streams import put


@pytest.fixture
def world(tmp_path: Path) -> Iterator[FeedWorld]:
    made = FeedWorld(tmp_path)
    yield made
    made.die()


def test_a_server_that_forgets_an_acknowledgement_is_told_again(world: FeedWorld) -> None:
    feed = begin(world)
    train(feed)
    feed.flush()
    books = world.stores["east"].save()
    feed.checkpointed()
    assert world.ledger("east") == {"produced": 4, "pending": 0, "trained": 4}
    world.stores["east"].restore(books)
    assert world.ledger("east") == {"produced": 4, "pending": 4}
    world.learner(feed.state(), version=1, epoch=2)  # as RedisStream hands them out again after an outage
    assert world.ledger("east") == {"produced": 4, "pending": 0, "trained": 4}
    assert len(world.log()) == BATCH


@pytest.mark.parametrize("when", ["queued", "trained", "logged"])
def test_a_group_that_a_server_forgot_and_got_again_has_one_fate(world: FeedWorld, when: str) -> None:
    """Under another entry id, since the spool still holds it."""
    feed = world.learner()
    books = world.stores["east"].save()
    world.take(BATCH)
    sent = [world.produce(index, 0) for index in range(BATCH)]
    now, forks = PolicyVersion(1, 0), {1: 0}
    feed.drain_backlog(now, forks)
    if when != "queued":
        train(feed)
    if when == "logged":
        feed.checkpointed()
        feed.flush()
    world.stores["east"].restore(books)
    put(MemoryStream(world.stores["east"]), *sent)
    feed.drain_backlog(now, forks)
    if when == "queued":
        assert train(feed) == [0, 1, 2, 3]
    feed.checkpointed()
    assert world.ledger("east") == {"produced": 4, "pending": 0, "trained": 4}
    assert len(world.log()) == BATCH


def test_a_copy_that_somebody_added_is_a_duplicate(world: FeedWorld) -> None:
    feed = begin(world)
    store = world.stores["east"]
    store.add(next(iter(store.entries.values())))
    feed.drain_backlog(PolicyVersion(1, 0), {1: 0})
    train(feed)
    feed.checkpointed()
    assert world.ledger("east") == {"produced": 4, "pending": 0, "trained": 4, "dropped:duplicate": 1}
    assert len(world.log()) == BATCH


@pytest.mark.parametrize("fate", ["dropped:age", "dropped:duplicate"])
def test_copies_that_arrive_together_and_are_dropped_both_have_their_end(world: FeedWorld, fate: str) -> None:
    """Else one stays pending, and a stream is not trimmed beyond it."""
    world.produce(0, 0)
    store = world.stores["east"]
    store.add(next(iter(store.entries.values())))
    feed = world.feed({"trained_below": 1} if fate == "dropped:duplicate" else None)
    feed.drain_backlog(PolicyVersion(1, 0 if fate == "dropped:duplicate" else MAX_AGE + 1), {1: 0})
    fates = {fate: 1, "dropped:duplicate": 1} if fate == "dropped:age" else {fate: 2}
    assert world.ledger("east") == {"produced": 1, "pending": 0, **fates}
    assert world.logged() == {1: fate}
