"""Batches, checkpoints, copies, deaths of the learner and of a server, in any order: every group has one fate in the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.consumers.fate_log import FateLog
from anabranch.consumers.reader import Reader
from anabranch.schemas.fates import CONSUMED
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_stream import MemoryStream
from tests.feeds import BATCH, FeedWorld
from tests.readers import wait
from tests.streams import put


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
