"""The learner dies between any two acts, a region's server forgets its last second, the disk is full: one line for each group,
an exact ledger, nothing trained twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.consumers.fate_log import FateLog
from anabranch.consumers.reader import Reader
from anabranch.learner.feed import Feed
from anabranch.schemas.errors import CheckpointError, DeadlineError, FateLogError, StreamUnavailableError
from anabranch.schemas.fates import CONSUMED, FateRecord
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_stream import MemoryStream
from tests.feeds import BATCH, MAX_AGE, FeedWorld, next_batch, train
from tests.readers import wait
from tests.streams import put


@pytest.fixture
def world(tmp_path: Path) -> Iterator[FeedWorld]:
    made = FeedWorld(tmp_path)
    yield made
    made.die()


def begin(world: FeedWorld, groups: int = BATCH) -> Feed:
    feed = world.learner()
    world.take(groups)
    for index in range(groups):
        world.produce(index, 0)
    return feed


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


class Away(MemoryStream):
    def settle(self, group: str, fates: Sequence[tuple[str, str]]) -> int:
        raise StreamUnavailableError("gone")


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


class Killed(BaseException):
    pass


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("produce"), st.integers(0, 11), st.sampled_from(["east", "west"])),
        st.tuples(st.just("copy"), st.integers(0, 20), st.sampled_from(["east", "west"])),
        st.tuples(st.just("train"), st.just(0), st.just("")),
        st.tuples(st.just("checkpoint"), st.just(0), st.just("")),
        st.tuples(st.just("kill at"), st.integers(1, 6), st.sampled_from(["append", "append-", "settle", "settle-"])),
        st.tuples(st.just("kill"), st.just(0), st.just("")),
        st.tuples(st.just("save"), st.just(0), st.just("east")),
        st.tuples(st.just("forget"), st.just(0), st.just("east")),
    ),
    max_size=30,
)


@settings(max_examples=60)
@given(acts=ACTS)
def test_whatever_happens_in_whatever_order(tmp_path_factory: pytest.TempPathFactory, acts: list[Any]) -> None:
    world = FeedWorld(tmp_path_factory.mktemp("world"))
    run = Run(world)
    try:
        for act in acts:
            run.do(*act)
        run.finish()
    finally:
        world.die()
        run.patch.undo()


class Run:
    """A learner that is started again whenever it dies, from its newest checkpoint; producers that keep all they sent."""

    def __init__(self, world: FeedWorld) -> None:
        self.world, self.patch = world, pytest.MonkeyPatch()
        self.fuse: tuple[int, str] | None = None
        self.sent: dict[str, list[Any]] = {"east": [], "west": []}
        self.books: dict[str, tuple[Any, int]] = {}
        self.epoch, self.version = 1, 0
        self.checkpoint: dict[str, Any] = {}
        self.checkpoint_version = 0
        for owner, name in ((FateLog, "append"), (Reader, "settle")):
            self.patch.setattr(owner, name, self._fused(getattr(owner, name), name))
        self.feed = world.learner(None)
        self.checkpoint = self.feed.state()

    def _fused(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._burn(name)
            answer = real(*args, **kwargs)
            self._burn(name + "-")
            return answer

        return call

    def _burn(self, name: str) -> None:
        if self.fuse is not None and self.fuse[1] == name:
            left = self.fuse[0] - 1
            self.fuse = (left, name) if left else None
            if not left:
                raise Killed

    def do(self, act: str, number: int, text: str) -> None:
        try:
            self._do(act, number, text)
        except Killed:
            self.restart()

    def _do(self, act: str, number: int, text: str) -> None:
        now, forks = PolicyVersion(self.epoch, self.version), {1: 0, self.epoch: self.checkpoint_version}
        if act == "produce":
            version = min(self.version, self.checkpoint_version)
            self.sent[text].append(self.world.produce(number, version, region=text))
        elif act == "copy" and self.sent[text]:  # by somebody else
            envelope = self.sent[text][number % len(self.sent[text])]
            self.world.stores[text].add({name.encode(): value for name, value in envelope.seal().items()})
        elif act == "train":
            self.feed.drain_backlog(now, forks)
            if self.feed.queued >= BATCH:
                batch = self.feed.next_batch(now, forks, deadline_s=0.0)
                if batch is not None:
                    self.feed.consumed(batch.arrivals)
                    self.version += 1
        elif act == "checkpoint":
            self.checkpoint, self.checkpoint_version = self.feed.state(), self.version
            self.feed.checkpointed()
        elif act == "kill at":
            self.fuse = (number, text)
        elif act == "kill":
            raise Killed
        elif act == "save":
            self.feed.flush(deadline_s=20)
            self.books[text] = self.world.stores[text].save(), len(self.sent[text])
        elif act == "forget" and text in self.books:
            self.feed._reader.close()  # an outage, after which RedisStream hands out what is pending
            self.world.stores[text].restore(self.books[text][0])
            put(MemoryStream(self.world.stores[text]), *self.sent[text][self.books[text][1] :])
            self.restart()

    def restart(self) -> None:
        self.fuse = None
        self.epoch += 1
        self.version = self.checkpoint_version
        self.feed = self.world.learner(self.checkpoint, version=self.version, epoch=self.epoch)

    def finish(self) -> None:
        self.fuse = None
        self.do("checkpoint", 0, "")
        now, forks = PolicyVersion(self.epoch, self.version), {1: 0, self.epoch: self.checkpoint_version}
        self.feed.drop_surplus(now, forks)
        wait(lambda: all(self.world.ledger(r)["pending"] == 0 for r in self.sent), "everything to end")
        records = self.world.log()
        assert {r.identity for r in records} == {(r, e.producer, e.seq) for r, sent in self.sent.items() for e in sent}
        consumed = [r.group_index for r in records if r.fate in CONSUMED]
        assert len(consumed) == len(set(consumed)), "trained twice"
        assert set(consumed) == self.feed.trained.indices()
        for region, sent in self.sent.items():
            ledger = self.world.ledger(region)
            fates = {f: n for f, n in ledger.items() if f not in ("produced", "pending")}
            copies = self.world.stores[region].foreign()
            assert sum(fates.values()) == len(sent) + copies
            assert ledger["produced"] == len(sent)
            more = [
                fates.get(fate, 0) - sum(r.fate == fate and r.region == region for r in records)
                for fate in {*fates, *(r.fate for r in records if r.region == region)}
            ]
            assert min(more, default=0) >= 0, "each line is counted, and beside them copies alone"
