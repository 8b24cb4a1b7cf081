"""The learner dies between any two acts, or cannot write its log: one line for each group, an exact ledger, nothing trained twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from anabranch.consumers.fate_log import FateLog
from anabranch.schemas.errors import CheckpointError, DeadlineError, FateLogError
from anabranch.schemas.fates import FateRecord
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_stream import MemoryStream
from tests.feeds import BATCH, MAX_AGE, Away, FeedWorld, begin, next_batch, train


@pytest.fixture
def world(tmp_path: Path) -> Iterator[FeedWorld]:
    made = FeedWorld(tmp_path)
    yield made
    made.die()


def test_before_the_checkpoint_the_same_groups_are_trained_again(world: FeedWorld) -> None:
    feed = begin(world)
    state = feed.state()
    assert train(feed) == train(world.learner(state, epoch=2), epoch=2) == [0, 1, 2, 3]
    assert world.log() == []


def test_between_checkpoint_and_log(world: FeedWorld) -> None:
    feed = begin(world, 2 * BATCH)
    train(feed)
    state = feed.state()  # durable, and nothing after it
    resumed = world.learner(state, version=1, epoch=2)
    assert world.logged() == dict.fromkeys(range(1, BATCH + 1), "trained")
    assert train(resumed, version=1, epoch=2, fork=1) == [4, 5, 6, 7]
    resumed.checkpointed()
    assert world.ledger("east") == {"produced": 8, "pending": 0, "trained": 8}
    assert len(world.log()) == 2 * BATCH


def test_between_log_and_acknowledgement(world: FeedWorld) -> None:
    healthy = world.streams["east"]
    world.streams["east"] = Away(world.stores["east"])
    feed = begin(world)
    train(feed)
    state = feed.state()
    feed.checkpointed()
    assert len(world.log()) == BATCH
    world.streams["east"] = healthy
    assert world.learner(state, version=1, epoch=2).trained.below == BATCH
    assert world.ledger("east") == {"produced": 4, "pending": 0, "trained": 4}
    assert len(world.log()) == BATCH


def test_after_the_acknowledgement(world: FeedWorld) -> None:
    feed = begin(world)
    train(feed)
    state = feed.state()
    feed.checkpointed()
    before = world.ledger("east")
    world.learner(state, version=1, epoch=2)
    assert world.ledger("east") == before == {"produced": 4, "pending": 0, "trained": 4}
    assert len(world.log()) == BATCH


def test_what_was_logged_long_ago_and_never_acknowledged_is_in_the_checkpoint(world: FeedWorld) -> None:
    """However much was logged since: the log need not be read to its beginning."""
    world.file_lines = world.recall = BATCH
    healthy = world.streams["east"]
    world.streams["east"] = Away(world.stores["east"])
    feed = begin(world)
    train(feed)
    feed.checkpointed()
    for index in range(BATCH):
        world.produce(index, 0, region="west")
    feed.drain_backlog(PolicyVersion(1, 1), {1: 0})
    feed.flush()
    state = feed.state()
    assert [e["logged"] for e in state["to_settle"]] == [True] * BATCH
    assert state["fate_log"] == [2, BATCH]
    world.streams["east"] = healthy
    resumed = world.learner(state, version=1, epoch=2)
    assert resumed._fates.fate(("east", "p", 1)) is None, "else this test shows nothing"
    assert world.ledger("east") == {"produced": 4, "pending": 0, "trained": 4}
    assert sorted(world.logged().values()) == ["dropped:duplicate"] * BATCH + ["trained"] * BATCH


def test_a_drop_is_final_whatever_the_checkpoint_says(world: FeedWorld) -> None:
    """Logged, then a crash before the acknowledgement, and a checkpoint from before the drop."""
    healthy = world.streams["east"]
    world.streams["east"] = Away(world.stores["east"])
    feed = begin(world)
    state = feed.state()
    with pytest.raises(DeadlineError):
        next_batch(feed, version=MAX_AGE + 1, deadline_s=1.0)
    assert set(world.logged().values()) == {"dropped:age"}
    world.streams["east"] = healthy
    resumed = world.learner(state, epoch=2)
    assert world.ledger("east") == {"produced": 4, "pending": 0, "dropped:age": 4}
    assert resumed.queued == 0, "though they would be young enough for it"
    assert len(world.log()) == BATCH


def test_permits_of_lost_groups_come_back_after_a_resume(world: FeedWorld) -> None:
    feed = world.learner()
    world.take(BATCH)
    for index in (0, 1):
        world.produce(index, 0)
    state = feed.state()
    world.now_ms = 1e15  # every lease has run out
    world.learner(state, epoch=2)
    assert [p.group_index for p in world.take(BATCH)] == [2, 3, 4, 5]


def test_what_a_region_that_is_configured_no_more_owes_waits_for_its_return(world: FeedWorld) -> None:
    healthy = dict(world.streams)
    world.streams["east"] = Away(world.stores["east"])
    feed = begin(world)
    train(feed)
    state = feed.state()
    world.streams = {"west": healthy["west"]}
    without = world.feed(state)
    assert world.logged() == dict.fromkeys(range(1, BATCH + 1), "trained")
    assert without.flush(deadline_s=1), "nobody waits for it"
    state = without.state()
    assert len(state["to_settle"]) == BATCH
    world.streams = healthy
    world.feed(state)
    assert world.ledger("east") == {"produced": 4, "pending": 0, "trained": 4}


def test_a_full_disk_delays_the_log_and_the_acknowledgement_with_it(
    world: FeedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = begin(world, BATCH + 1)
    world.produce(0, 0)  # a duplicate
    real, full = FateLog.append, [True]

    def append(self: FateLog, records: Iterable[FateRecord]) -> None:
        if full[0]:
            raise FateLogError("no space left on device")
        real(self, records)

    monkeypatch.setattr(FateLog, "append", append)
    monkeypatch.setattr("anabranch.learner.fate_book.RETRY_S", 0.0)
    feed.drain_backlog(PolicyVersion(1, 0), {1: 0})
    assert train(feed) == [0, 1, 2, 3], "training goes on"
    feed.checkpointed()
    assert not feed.flush(deadline_s=1)
    assert feed.error == "no space left on device"
    assert MemoryStream(world.stores["east"]).ledger("learner").pending == BATCH + 2
    assert len(feed.state()["to_settle"]) == BATCH + 1
    full[0] = False
    with pytest.raises(DeadlineError):  # while it waits for the next batch, it tries again
        next_batch(feed, version=1, deadline_s=1.0)
    assert feed.error == ""
    assert world.ledger("east") == {"produced": 6, "pending": 1, "trained": 4, "dropped:duplicate": 1}


def test_a_checkpoint_of_another_program_version_is_refused_by_name(world: FeedWorld) -> None:
    with pytest.raises(CheckpointError, match="list of groups to settle is not of this version"):
        world.feed({"to_settle": [["east", "1-1", "trained"]]})
