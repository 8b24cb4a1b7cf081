"""A region that refuses the learner costs its own groups; when all do, the learner ends and says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.schemas.errors import ConfigError, DeadlineError
from anabranch.transport.memory_stream import MemoryStream
from anabranch.transport.stream import Delivery
from tests.feeds import BATCH, FeedWorld, next_batch, train


class Refusing(MemoryStream):
    def read_own_pending(self, group: str, consumer: str, *, max_entries: int, after_id: str = "0-0") -> list[Delivery]:
        raise ConfigError("the Redis of a region refused the credentials")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[FeedWorld]:
    made = FeedWorld(tmp_path)
    yield made
    made.die()


def test_the_learner_goes_on_with_the_other_regions(world: FeedWorld) -> None:
    world.streams["east"] = Refusing(world.stores["east"])
    feed = world.learner()
    world.take(BATCH)
    for index in range(BATCH):
        world.produce(index, 0, region="west")
    assert train(feed) == [0, 1, 2, 3]
    feed.checkpointed()
    assert feed.flush(deadline_s=20)
    assert world.ledger("west") == {"produced": 4, "pending": 0, "trained": 4}
    with pytest.raises(DeadlineError, match=r"region east refusing for .* refused the credentials"):
        next_batch(feed, version=1, deadline_s=0.5)


def test_when_all_refuse_it_ends(world: FeedWorld) -> None:
    world.streams = {name: Refusing(store) for name, store in world.stores.items()}
    with pytest.raises(ConfigError, match="refused the credentials"):
        next_batch(world.feed())
