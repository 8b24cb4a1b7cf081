"""The learner's feed: from regions to batches, and back to acknowledgements.

Invariant: an entry is acknowledged only after a durable checkpoint contains the update it went into (or when it is
dropped for good), so a crash at any point loses nothing: what was not acknowledged is delivered again. Every arrival
ends as trained, dropped(cause) or pending. Held by tests/unit/learner/test_feed.py and tests/process/.

Fates: trained; dropped:zero_variance (consumed by a step, without gradient); dropped:age and dropped:dead_letter
(their permits are handed out again); dropped:false_version (a token claims a policy beyond the learner's: likewise);
dropped:duplicate; dropped:surplus (sampled, but the run ended first).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from anabranch.consumers.batcher import GroupQueue, TrainedSet, Verdict
from anabranch.consumers.reader import Arrival, Reader
from anabranch.schemas.errors import BackpressureError, DeadlineError, StreamUnavailableError
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.schemas.versions import Forks, PolicyVersion
from anabranch.transport.permits import Permits
from anabranch.transport.retry import retry_until
from anabranch.transport.stream import TrajectoryStream

TRAINED = "trained"
ZERO_VARIANCE = "dropped:zero_variance"
AGE = "dropped:age"
DUPLICATE = "dropped:duplicate"
FALSE_VERSION = "dropped:false_version"
SURPLUS = "dropped:surplus"
DEAD_LETTER = "dead_letter"
NOT_NOW = (StreamUnavailableError, BackpressureError)  # a region that is away, or takes no writes (its disk is full)


@dataclass(frozen=True, slots=True)
class FedBatch:
    """Groups for one step, in order, and what was dropped (by cause) while they were gathered."""

    arrivals: list[Arrival]
    dropped: dict[str, int]
    wait_s: float


class Feed:
    def __init__(
        self,
        reader: Reader,
        streams: Mapping[str, TrajectoryStream],
        permits: Permits,
        *,
        batch_groups: int,
        max_age: int,
        block_ms: int,
        hub_deadline_s: float,
        resumed: Mapping[str, Any] | None = None,
    ) -> None:
        """`resumed` is an earlier `state()`, out of a checkpoint."""
        self._reader, self._streams, self._permits = reader, streams, permits
        self._batch_groups, self._max_age, self._block_ms = batch_groups, max_age, block_ms
        self._hub_deadline_s = hub_deadline_s
        resumed = resumed or {}
        self.trained = TrainedSet(resumed.get("trained_below", 0), resumed.get("trained_beyond", ()))
        # Settled by the checkpoint we came from, perhaps not yet in the stream.
        self._to_settle: list[tuple[str, str, str]] = [tuple(x) for x in resumed.get("to_settle", ())]  # type: ignore[misc]
        self._queue = GroupQueue(self.trained, unacknowledged={(r, e) for r, e, _ in self._to_settle})
        self._dropped: Counter[str] = Counter()
        self._log = structlog.get_logger()

    @property
    def queued(self) -> int:
        return len(self._queue)

    def depth(self) -> dict[str, int]:
        """Region -> groups queued here."""
        return self._queue.depth()

    def drain_backlog(self, *, quiet_polls: int = 3) -> set[int]:
        """Read what already waits in the streams, until `quiet_polls` rounds bring nothing. Returns the group indices
        that need no new permit: trained or queued."""
        quiet = 0
        while quiet < quiet_polls:
            quiet = 0 if self._poll(block_ms=5, give_back=False) else quiet + 1
        return self.trained.indices() | self._queue.indices

    def next_batch(
        self,
        now: PolicyVersion,
        forks: Forks,
        *,
        deadline_s: float,
        waiting: Callable[[str], None] = lambda _: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> FedBatch | None:
        """The next batch, swept by age against `now`; None when `stop()` turned true first.

        `waiting` is told what the batch lacks. Raises DeadlineError when no batch came together in `deadline_s`.
        """
        started = time.monotonic()
        if len(self._queue) >= self._batch_groups:
            # Even when enough waits here: what stands in a stream unseen keeps a lease that nobody renews.
            self._poll(block_ms=1, give_back=True)
        while not stop():
            false = self._queue.from_the_future(now)
            if false:
                self._log.warning("groups claim weights that do not exist yet", groups=len(false), now=str(now))
                self._drop(false, FALSE_VERSION, give_back=True)
            old = self._queue.sweep(now, forks, self._max_age)
            if old:
                self._drop(old, AGE, give_back=True)
            batch = self._queue.take(self._batch_groups)
            if batch is not None:
                dropped, self._dropped = dict(self._dropped), Counter()
                return FedBatch(batch, dropped, time.monotonic() - started)
            elapsed = time.monotonic() - started
            what = self._lacking()
            if elapsed > deadline_s:
                raise DeadlineError.waiting_for(what, elapsed, "are the producers running? see their status and logs")
            waiting(what)
            self._poll(block_ms=self._block_ms, give_back=True)
        return None

    def consumed(self, fates: Mapping[tuple[str, str], str]) -> None:
        """The optimizer step that consumed these entries is done: (region, entry id) -> fate. They are settled by
        the next `checkpointed`."""
        self._to_settle.extend((region, entry, fate) for (region, entry), fate in fates.items())
        self._dropped.update(f.removeprefix("dropped:") for f in fates.values() if f != TRAINED)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold so that nothing is trained twice or lost; plain JSON."""
        return {
            "trained_below": self.trained.below,
            "trained_beyond": sorted(self.trained.beyond),
            "to_settle": [list(x) for x in self._to_settle],
        }

    def checkpointed(self) -> int:
        """A checkpoint holding `state()` is durable: acknowledge. A region that cannot be reached is tried again at the
        next call. Returns how many entries were settled."""
        settled = 0
        away = self._reader.unreachable()  # asking it again would only cost the learner a time-out
        for region in sorted({r for r, _, _ in self._to_settle} - away.keys()):
            mine = [(entry, fate) for r, entry, fate in self._to_settle if r == region]
            try:
                settled += self._streams[region].settle(LEARNER_GROUP, mine)
                self._streams[region].trim()
            except NOT_NOW as error:
                self._log.warning("cannot acknowledge yet", region=region, entries=len(mine), error=str(error))
                continue
            self._to_settle = [x for x in self._to_settle if x[0] != region]
            self._queue.forget((region, entry) for entry, _ in mine)
        return settled

    def drop_surplus(self) -> int:
        """The run is over: everything that still waits is dropped. Returns how many groups."""
        self.drain_backlog()
        rest = self._queue.clear()
        if self._to_settle:  # a region was away at the last checkpoint
            self.checkpointed()
        self._drop(rest, SURPLUS, give_back=False)
        return len(rest)

    def _poll(self, *, block_ms: int, give_back: bool) -> int:
        polled = self._reader.poll(block_ms=block_ms)
        arrived: list[int] = []
        for arrival in polled.arrivals:
            verdict = self._queue.offer(arrival)
            if verdict is Verdict.QUEUED:
                arrived.append(arrival.group.group_index)
            elif verdict is Verdict.DUPLICATE:
                self._drop([arrival], DUPLICATE, give_back=False)
        if arrived:
            self._hub(lambda: self._permits.settle(arrived))
        lost = [d.group_index for d in polled.dead if d.group_index is not None and d.group_index not in self.trained]
        self._dropped.update({DEAD_LETTER: len(polled.dead)} if polled.dead else {})
        if lost and give_back:
            again = [g for g in lost if g not in self._queue.indices]
            self._hub(lambda: self._permits.give_back(again))
        return len(polled.arrivals) + len(polled.dead)

    def _drop(self, arrivals: list[Arrival], fate: str, *, give_back: bool) -> None:
        """Settle for good, one call a region. Where that cannot be reached, a later `checkpointed` does it."""
        if give_back:
            again = [a.group.group_index for a in arrivals]
            self._hub(lambda: self._permits.give_back(again))
        self._dropped[fate.removeprefix("dropped:")] += len(arrivals)
        for region in sorted({a.region for a in arrivals}):
            mine = [(a.entry_id, fate) for a in arrivals if a.region == region]
            try:
                if region in self._reader.unreachable():
                    raise StreamUnavailableError(region)
                self._streams[region].settle(LEARNER_GROUP, mine)
            except NOT_NOW:
                self._to_settle += [(region, entry, fate) for entry, fate in mine]

    def _hub(self, call: Callable[[], None]) -> None:
        retry_until(call, deadline_s=self._hub_deadline_s, what="the hub's Redis, to account for permits")

    def _lacking(self) -> str:
        unreachable = self._reader.unreachable()
        away = f"; unreachable: {', '.join(unreachable)}" if unreachable else ""
        return f"{self._batch_groups - len(self._queue)} more groups of {self._batch_groups}{away}"
