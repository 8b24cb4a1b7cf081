"""The feed over in-memory streams: everything that arrives ends as trained, dropped(cause) or pending."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from anabranch.learner import feed as feed_module
from anabranch.schemas.envelope import Envelope
from anabranch.schemas.errors import BackpressureError, DeadlineError, StreamUnavailableError, TemporaryError
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_stream import MemoryStream
from tests.feeds import BATCH, MAX_AGE, FeedWorld, begin, indices, next_batch, train
from tests.readers import wait


@pytest.fixture
def world(tmp_path: Path) -> Iterator[FeedWorld]:
    made = FeedWorld(tmp_path)
    yield made
    made.die()


def test_a_batch_mixes_regions_and_is_acknowledged_only_after_a_checkpoint(world: FeedWorld) -> None:
    feed = world.learner()
    for permit in world.take(BATCH):
        world.produce(permit.group_index, 0, region=["east", "west"][permit.group_index % 2])
    assert train(feed) == [0, 1, 2, 3]
    assert world.ledger("east") == {"produced": 2, "pending": 2}
    assert world.log() == []
    feed.checkpointed()
    assert world.ledger("east") == {"produced": 2, "pending": 0, "trained": 2}
    assert world.ledger("west") == {"produced": 2, "pending": 0, "trained": 2}


def test_the_log_says_what_a_group_was_like(world: FeedWorld) -> None:
    feed = world.learner(version=1)
    world.take(BATCH)
    for index in range(BATCH):
        world.produce(index, 0, region="west", attempt=index)
    batch = next_batch(feed, version=1)
    feed.consumed(batch.arrivals, zero_variance={2})
    feed.checkpointed()
    first, _, third, _ = world.log()
    assert (first.identity, first.group_index, third.attempt) == (("west", "p", 1), 0, 2)
    assert [r.fate for r in (first, third)] == ["trained", "dropped:zero_variance"]
    assert (first.epoch, first.version, first.age) == (1, 1, 1)
    assert (first.rollouts, first.tokens, first.cut, first.reward) == (2, 4, 1, 0.5)
    assert world.ledger("west")["dropped:zero_variance"] == 1


def test_the_log_says_when_a_group_came_and_was_admitted_or_that_it_was_refused(world: FeedWorld) -> None:
    """Refused at its arrival: never admitted. Admitted, and too old for the next batch: with both times."""
    began = time.time_ns() // 1_000_000
    feed = begin(world)
    batch = next_batch(feed)
    world.produce(0, 0, attempt=1)  # another attempt at a group that is in a batch
    world.produce(9, 0)
    with pytest.raises(DeadlineError):
        next_batch(feed, version=0, deadline_s=0.5)
    with pytest.raises(DeadlineError):
        next_batch(feed, version=MAX_AGE + 1, deadline_s=0.1)
    world.produce(10, 0)
    with pytest.raises(DeadlineError):
        next_batch(feed, version=MAX_AGE + 1, deadline_s=0.5)
    feed.consumed(batch.arrivals)
    feed.checkpointed()
    records = {r.seq: r for r in world.log()}
    for seq in (1, 2, 3, 4, 6):
        delivered, admitted = records[seq].delivered_ms, records[seq].admitted_ms
        assert delivered is not None
        assert admitted is not None
        assert began <= delivered <= admitted <= records[seq].time_ms
    assert [records[seq].fate for seq in (1, 5, 6, 7)] == ["trained", "dropped:duplicate", "dropped:age", "dropped:age"]
    for seq in (5, 7):
        assert records[seq].delivered_ms is not None
        assert records[seq].admitted_ms is None


def test_what_a_gate_kept_from_the_weights_is_said_so_also_of_groups_without_gradient(world: FeedWorld) -> None:
    feed = begin(world)
    feed.consumed(next_batch(feed).arrivals, zero_variance={1, 2}, gated={2, 3})
    assert world.log() == [], "a checkpoint first"
    feed.checkpointed()
    assert [r.fate for r in world.log()] == ["trained", "dropped:zero_variance", "dropped:gate", "dropped:gate"]
    assert world.ledger("east")["dropped:gate"] == 2
    world.produce(3, 0, attempt=1)
    with pytest.raises(DeadlineError):
        next_batch(feed, version=1, deadline_s=0.1)
    assert world.log()[-1].fate == "dropped:duplicate", "consumed: nobody need sample it again"


def test_the_lowest_group_indices_go_first_and_a_straggler_holds_nothing(world: FeedWorld) -> None:
    world.feed()
    for index in (7, 3, 9, 1, 5):
        world.produce(index, 0)
    assert indices(next_batch(world.learner())) == [1, 3, 5, 7]


def test_an_old_group_is_dropped_and_its_permit_handed_out_again(world: FeedWorld) -> None:
    feed = world.learner()
    world.take(BATCH)
    for index in range(BATCH):
        world.produce(index, 0)
    with pytest.raises(DeadlineError, match="4 more groups of 4"):
        next_batch(feed, version=MAX_AGE + 1, deadline_s=1.0)
    assert world.ledger("east") == {"produced": 4, "pending": 0, "dropped:age": 4}
    assert {r.age for r in world.log()} == {MAX_AGE + 1}
    again = world.take(BATCH)
    assert [(p.group_index, p.attempt) for p in again] == [(i, 1) for i in range(4)]


def test_an_old_group_does_not_end_an_attempt_that_is_under_way(world: FeedWorld) -> None:
    feed = world.learner()
    world.take(1)
    world.now_ms += 61_000
    (again,) = world.permits.take("q", max_groups=1, lease_ms=600_000)
    assert (again.group_index, again.attempt) == (0, 1)
    world.produce(0, 0)
    with pytest.raises(DeadlineError):
        next_batch(feed, version=MAX_AGE + 1, deadline_s=1.0)
    assert world.ledger("east") == {"produced": 1, "pending": 0, "dropped:age": 1}
    assert world.permits.renew("q", [0], lease_ms=600_000) == []


def test_a_group_that_grows_old_while_it_waits_is_dropped_too(world: FeedWorld) -> None:
    feed = world.learner()
    world.take(2 * BATCH)
    for index in range(2 * BATCH - 1):
        world.produce(index, 0)
    assert train(feed) == [0, 1, 2, 3]
    with pytest.raises(DeadlineError):
        next_batch(feed, version=MAX_AGE + 1, deadline_s=1.0)
    assert world.ledger("east")["dropped:age"] == BATCH - 1
    assert [p.group_index for p in world.take(BATCH)][: BATCH - 1] == [4, 5, 6]


def test_a_second_delivery_of_the_same_group_is_dropped_as_duplicate(world: FeedWorld) -> None:
    feed = world.learner()
    world.take(BATCH)
    for index in (0, 0, 1, 2, 3):
        world.produce(index, 0)
    assert train(feed) == [0, 1, 2, 3]
    assert world.ledger("east") == {"produced": 5, "pending": 4, "dropped:duplicate": 1}
    assert world.logged() == {2: "dropped:duplicate"}


def test_a_group_that_is_too_old_is_dropped_for_its_age_also_when_another_attempt_was_trained(world: FeedWorld) -> None:
    feed = world.learner()
    world.take(3 * BATCH)
    for index in range(BATCH):
        world.produce(index, 0)
    train(feed)
    world.produce(0, 0)  # of the same index, and too old when it comes
    for index in range(BATCH, 2 * BATCH):
        world.produce(index, 3)
    assert train(feed, version=3) == [4, 5, 6, 7]
    assert world.ledger("east") == {"produced": 9, "pending": 8, "dropped:age": 1}
    assert 0 not in [p.group_index for p in world.take(50)], "nobody samples a trained index again"


def test_an_old_one_does_not_stand_in_the_way_of_a_fresh_one(world: FeedWorld) -> None:
    feed = world.learner(version=3)
    world.take(BATCH)
    for version in (0, 3):
        for index in range(BATCH):
            world.produce(index, version, attempt=version)
    batch = next_batch(feed, version=3)
    assert [(a.group.group_index, a.group.attempt) for a in batch.arrivals] == [(i, 3) for i in range(BATCH)]
    assert world.ledger("east")["dropped:age"] == BATCH


def test_groups_of_a_sibling_line_count_their_distance_through_the_fork(world: FeedWorld) -> None:
    feed = world.learner(version=1, epoch=2)  # forked at 1; the dead learner had gone on to 2 and 4
    world.take(8)
    for index in range(BATCH):
        world.produce(index, 2, epoch=1)  # distance 1
    world.produce(4, 4, epoch=1)  # distance 3: beyond the bound
    assert indices(next_batch(feed, version=1, epoch=2, fork=1)) == [0, 1, 2, 3]
    feed.drain_backlog(PolicyVersion(2, 1), {1: 0, 2: 1})
    assert world.ledger("east")["dropped:age"] == 1


def test_a_group_that_claims_weights_of_the_future_is_dropped_and_sampled_again(world: FeedWorld) -> None:
    feed = world.learner()
    world.take(BATCH + 2)
    world.produce(0, 3)
    world.produce(1, 0, epoch=9)
    for index in range(2, BATCH + 2):
        world.produce(index, 0)
    assert indices(next_batch(feed)) == [2, 3, 4, 5]
    assert world.ledger("east")["dropped:false_version"] == 2
    assert [p.group_index for p in world.take(2)] == [0, 1]


class Cut(MemoryStream):
    """Acknowledges nothing while `error` is set."""

    error: TemporaryError | None = None

    def settle(self, group: str, fates: Sequence[tuple[str, str]]) -> int:
        if self.error is not None:
            raise self.error
        return super().settle(group, fates)


@pytest.mark.parametrize("error", [StreamUnavailableError("west"), BackpressureError("west")])
def test_a_region_that_is_away_or_full_is_acknowledged_later_and_nobody_waits(
    world: FeedWorld, error: TemporaryError
) -> None:
    west = Cut(world.stores["west"])
    world.streams["west"] = west
    feed = world.learner()
    world.take(2 * BATCH)
    for index in range(BATCH):
        world.produce(index, 0, region=["east", "west"][index % 2])
    train(feed)
    west.error = error
    feed.checkpointed()
    wait(
        lambda: MemoryStream(world.stores["east"]).ledger("learner").fates == {"trained": 2}, "the region that is there"
    )
    assert MemoryStream(world.stores["west"]).ledger("learner").pending == 2
    assert len(feed.state()["to_settle"]) == 2, "a crash now forgets nothing"
    west.error = None
    wait(lambda: MemoryStream(world.stores["west"]).ledger("learner").fates == {"trained": 2}, "the one that is back")
    wait(lambda: feed.state()["to_settle"] == [], "the feed to know")


def test_what_arrives_while_a_batch_is_ready_is_seen_before_its_lease_runs_out(world: FeedWorld) -> None:
    """A producer renews no lease of a group that is stored: unseen, it would be sampled a second time."""
    feed = world.learner()
    world.take(3 * BATCH)
    for index in range(2 * BATCH):
        world.produce(index, 0)
    feed.drain_backlog(PolicyVersion(1, 0), {1: 0})
    train(feed)
    assert feed.queued == BATCH
    for index in range(2 * BATCH, 3 * BATCH):
        world.produce(index, 0)
    wait(lambda: len(feed._reader._regions["east"]._ready) == BATCH, "the reader to read ahead")
    train(feed)
    world.now_ms += 61_000
    assert world.take(BATCH) == []


def test_what_is_left_at_the_end_is_dropped_as_surplus(world: FeedWorld) -> None:
    feed = world.learner()
    world.take(BATCH + 2)
    for index in range(BATCH + 2):
        world.produce(index, 0)
    train(feed)
    feed.checkpointed()
    assert feed.drop_surplus(PolicyVersion(1, 1), {1: 0}) == 2
    assert world.ledger("east") == {"produced": 6, "pending": 0, "trained": 4, "dropped:surplus": 2}


def test_the_last_waits_say_what_for_and_that_the_learner_lives(
    world: FeedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "BEAT_S", 0.01)

    class Full(MemoryStream):
        def settle(self, group: str, fates: Sequence[tuple[str, str]]) -> int:
            raise BackpressureError("disk full")

    world.streams["east"] = Full(world.stores["east"])
    said, beats = list[str](), list[int]()
    feed = world.feed(heartbeat=lambda: beats.append(1))
    world.produce(0, 0)
    monkeypatch.setattr(feed_module, "SETTLE_DEADLINE_S", 0.2)
    assert feed.drop_surplus(PolicyVersion(1, 0), {1: 0}, waiting=said.append) == 1
    assert set(said) == {"what stands in the regions' streams", "the regions' Redis, to acknowledge what has ended"}
    assert len(beats) > len([text for text in said if "streams" in text]) + 3, "while it acknowledges too"


def test_dead_letters_have_no_line_and_their_index_is_handed_out_again(world: FeedWorld) -> None:
    feed = world.learner()
    world.take(BATCH)
    for index in range(BATCH - 1):
        world.produce(index, 0)
    torn = Envelope("p", 99, BATCH - 1, b"not arrow").seal()
    world.stores["east"].add({name.encode(): value for name, value in torn.items()})
    with pytest.raises(DeadlineError, match="1 more groups of 4"):
        next_batch(feed, deadline_s=1.0)
    assert world.log() == []
    assert world.ledger("east") == {"produced": 3, "pending": 3, "dropped:dead_letter": 1}
    assert world.take(1)[0].group_index == BATCH - 1


def test_abandoned_groups_are_passed_over(world: FeedWorld) -> None:
    """Else what is trained beyond them would be kept one by one, for ever."""
    feed = world.learner()
    world.take(BATCH + 1)
    world.permits.give_up("p", [0], max_attempts=1)
    for index in range(1, BATCH + 1):
        world.produce(index, 0)
    train(feed)
    assert feed.trained.below == 0
    feed.checkpointed()
    assert (feed.trained.below, feed.trained.beyond, feed.trained.abandoned) == (BATCH + 1, set(), {0})
    resumed = world.learner(feed.state(), version=1, epoch=2)
    assert resumed.trained.abandoned == {0}


def test_a_long_wait_names_its_cause(world: FeedWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "WHY_AFTER_S", 0.05)

    class Away(MemoryStream):
        def read_own_pending(self, group: str, consumer: str, *, max_entries: int, after_id: str = "0-0"):
            raise StreamUnavailableError("no route to west")

    world.streams["west"] = Away(world.stores["west"])
    feed = world.feed(why=lambda: "no producer has reported for 300 s")
    said: list[str] = []
    with pytest.raises(DeadlineError) as caught:
        feed.next_batch(PolicyVersion(1, 0), {1: 0}, deadline_s=1.0, waiting=said.append)
    for text in (str(caught.value), said[-1]):
        assert "4 more groups of 4" in text
        assert re.search(r"region west unreachable for \d s \(no route to west\)", text)
        assert "no producer has reported for 300 s" in text
    assert "no producer" not in said[0]
