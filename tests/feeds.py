"""A learner's feed over regions in memory, for tests: starts and crashes of the learner, servers that forget."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.consumers.fate_files import FATES_DIRECTORY, read_fates
from anabranch.consumers.fate_log import RECALL, FateLog
from anabranch.consumers.reader import Reader
from anabranch.learner.feed import FedBatch, Feed
from anabranch.schemas.config import StreamSection
from anabranch.schemas.envelope import Envelope
from anabranch.schemas.errors import StreamUnavailableError
from anabranch.schemas.fates import FateRecord
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.schemas.trajectory import Group, Rollout, encode_group
from anabranch.schemas.versions import PolicyVersion, VersionSpan
from anabranch.transport.memory_permits import MemoryPermits
from anabranch.transport.memory_stream import MemoryStream, MemoryStreamStore
from anabranch.transport.permits import Permit
from anabranch.transport.stream import TrajectoryStream
from tests.streams import put

BATCH = 4
MAX_AGE = 2


def sampled(index: int, version: int, *, epoch: int = 1, region: str = "east", attempt: int = 0) -> Group:
    rollouts = tuple(
        Rollout(
            sample_index=s,
            token_ids=np.array([1, 2], np.int32),
            logprobs=np.array([-1.0, -0.5], np.float32),
            spans=(VersionSpan(PolicyVersion(epoch, version), 0),),
            reward=float(s % 2),
            finish_reason="stop" if s else "length",
            text="x",
            started_ms=0,
            finished_ms=1,
        )
        for s in range(2)
    )
    return Group("run", region, "p", index, attempt, np.array([5], np.int32), "q", "a", rollouts)


class FeedWorld:
    """Two regions, one hub, one disk; `learner()` is a fresh start of the learner, from `state` if given: whoever ran before
    is dead, with all it had not made durable. Close it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stores = {name: MemoryStreamStore() for name in ("east", "west")}
        self.streams: dict[str, TrajectoryStream] = {name: MemoryStream(store) for name, store in self.stores.items()}
        self.now_ms = 0.0
        self.permits = MemoryPermits("run", clock_ms=lambda: self.now_ms)
        self.seq = 0
        self.file_lines, self.recall = 100, RECALL  # of the fate log
        self._living: Feed | None = None

    def feed(self, state: Mapping[str, Any] | None = None, **more: Any) -> Feed:
        """Without opening permits. `state` goes the way of a checkpoint, through JSON."""
        self.die()
        resumed = json.loads(json.dumps(state)) if state is not None else {}
        log = FateLog(
            self.root / FATES_DIRECTORY, file_lines=self.file_lines, recall=self.recall, since=resumed.get("fate_log")
        )
        reader = Reader(
            self.streams, run="run", group=LEARNER_GROUP, consumer="learner-0", config=StreamSection(block_ms=2)
        )
        self._living = Feed(
            reader, self.permits, log, batch_groups=BATCH, max_age=MAX_AGE, block_ms=4, hub_deadline_s=1,
            resumed=resumed, **more,
        )  # fmt: skip
        return self._living

    def learner(
        self, state: Mapping[str, Any] | None = None, *, version: int = 0, epoch: int = 1, total: int = 100
    ) -> Feed:
        feed = self.feed(state)
        accepted = feed.drain_backlog(PolicyVersion(epoch, version), {1: 0, epoch: version})
        self.permits.reset(
            epoch=epoch, version=version, batch=BATCH, max_age=MAX_AGE, total=total, accepted=accepted,
            abandoned=feed.trained.abandoned,
        )  # fmt: skip
        return feed

    def die(self) -> None:
        if self._living is not None:
            self._living.close()
            self._living = None

    def take(self, count: int) -> list[Permit]:
        return self.permits.take("p", max_groups=count, lease_ms=60_000)

    def produce(self, index: int, version: int, region: str = "east", epoch: int = 1, attempt: int = 0) -> Envelope:
        self.seq += 1
        payload = encode_group(sampled(index, version, epoch=epoch, region=region, attempt=attempt))
        envelope = Envelope("p", self.seq, index, payload)
        put(MemoryStream(self.stores[region]), envelope)
        return envelope

    def ledger(self, region: str) -> dict[str, int]:
        """Once what was decided has reached the region."""
        if self._living is not None:
            self._living.flush(deadline_s=20)
        counts = MemoryStream(self.stores[region]).ledger(LEARNER_GROUP)
        assert counts.balanced, counts
        return {"produced": counts.produced, "pending": counts.pending, **counts.fates}

    def log(self) -> list[FateRecord]:
        records = list(read_fates(self.root / FATES_DIRECTORY))
        assert len({r.identity for r in records}) == len(records), "a delivery has one line"
        return records

    def logged(self) -> dict[int, str]:
        """seq -> fate."""
        return {record.seq: record.fate for record in self.log()}


def indices(batch: FedBatch | None) -> list[int]:
    assert batch is not None
    return [a.group.group_index for a in batch.arrivals]


def next_batch(feed: Feed, version: int = 0, epoch: int = 1, fork: int = 0, deadline_s: float = 20.0) -> FedBatch:
    batch = feed.next_batch(PolicyVersion(epoch, version), {1: 0, epoch: fork}, deadline_s=deadline_s)
    assert batch is not None
    return batch


def train(feed: Feed, version: int = 0, epoch: int = 1, fork: int = 0) -> list[int]:
    """A step on the next batch; its group indices."""
    batch = next_batch(feed, version, epoch, fork)
    feed.consumed(batch.arrivals)
    return indices(batch)


def begin(world: FeedWorld, groups: int = BATCH) -> Feed:
    feed = world.learner()
    world.take(groups)
    for index in range(groups):
        world.produce(index, 0)
    return feed


class Away(MemoryStream):
    """Whose acknowledgements do not get through."""

    def settle(self, group: str, fates: Sequence[tuple[str, str]]) -> int:
        raise StreamUnavailableError("gone")
