"""The learner's feed: from regions to batches, and back to acknowledgements.

Invariant: an entry is acknowledged only after a durable checkpoint contains the update it went into (or when it is
dropped for good) and the fate log has its line, so a crash at any point loses nothing: what was not acknowledged is
delivered again. Every arrival ends as trained, dropped(cause) or pending, and a group that is too old is dropped for its
age whatever else is the matter with it. No region is waited for. Held by tests/unit/learner/test_feed.py,
tests/unit/learner/test_feed_crashes.py, tests/unit/learner/test_feed_repeats.py, tests/unit/learner/test_feed_any_order.py,
tests/unit/learner/test_feed_refusals.py and tests/process/test_feed_kills.py.

Fates are those of schemas/fates.py. The permits of dropped:age, dropped:false_version and dead letters are handed out again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import structlog

from anabranch.consumers.arrivals import Arrival, DeadLetter
from anabranch.consumers.batcher import GroupQueue, TrainedSet, Verdict, claims_the_future, group_age
from anabranch.consumers.fate_log import FateLog
from anabranch.consumers.reader import Reader
from anabranch.learner.fate_book import Ending, FateBook, fate_record
from anabranch.schemas.errors import BackpressureError, DeadlineError, StreamUnavailableError
from anabranch.schemas.fates import (
    AGE,
    DUPLICATE,
    FALSE_VERSION,
    GATE,
    SURPLUS,
    TRAINED,
    ZERO_VARIANCE,
    FateRecord,
    Identity,
)
from anabranch.schemas.versions import Forks, PolicyVersion
from anabranch.transport.permits import Permits
from anabranch.transport.retry import retry_until, sleep_alive

DEAD_LETTER = "dead_letter"
DRAIN_DEADLINE_S = 60.0  # what then still stands unread is seen later, at worst as a duplicate
SETTLE_DEADLINE_S = 15.0
BEAT_S = 1.0  # a wait under a watchdog says so often that it lives
WHY_AFTER_S = 10.0  # a wait so long names its cause
_TRAINED: dict[str, Any] = {"trained_below": 0, "trained_beyond": (), "abandoned": ()}  # in `state`


@dataclass(frozen=True, slots=True)
class FedBatch:
    """Groups for one step, in order, and what was dropped (by cause) while they were gathered."""

    arrivals: list[Arrival]
    dropped: dict[str, int]
    wait_s: float


class Feed:
    """`why`: says, when a batch is long in coming, what is the matter (see `NoProgress`). `close` it."""

    def __init__(
        self,
        reader: Reader,
        permits: Permits,
        log: FateLog,
        *,
        batch_groups: int,
        max_age: int,
        block_ms: int,
        hub_deadline_s: float,
        resumed: Mapping[str, Any] | None = None,
        why: Callable[[], str] = lambda: "",
        heartbeat: Callable[[], object] = lambda: None,
    ) -> None:
        """`resumed` is an earlier `state()`, out of a checkpoint: what it had to settle is settled as soon as may be."""
        self._reader, self._permits, self._fates, self._why = reader, permits, log, why
        self._batch_groups, self._max_age, self._block_ms = batch_groups, max_age, block_ms
        self._hub_deadline_s, self._heartbeat = hub_deadline_s, heartbeat
        resumed = resumed or {}
        self.trained = TrainedSet(*(resumed.get(key, empty) for key, empty in _TRAINED.items()))
        self._book = FateBook(log, reader, resumed=resumed.get("to_settle", ()))
        self._queue = GroupQueue(self.trained)
        self._consumed: list[tuple[Arrival, FateRecord]] = []  # in no durable checkpoint yet
        self._now, self._forks = PolicyVersion(0, 0), dict[int, int]()  # until the first call that says it
        self._dropped: Counter[str] = Counter()
        self._log = structlog.get_logger()

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def error(self) -> str:
        """Why fates cannot be logged now, '' if they can."""
        return self._book.error

    def depth(self) -> dict[str, int]:
        """Region -> groups queued here."""
        return self._queue.depth()

    def drain_backlog(
        self, now: PolicyVersion, forks: Forks, *, waiting: Callable[[str], None] = lambda _: None
    ) -> set[int]:
        """Read what already waits in the streams that can be reached. Returns the group indices that need no new permit:
        trained or queued."""
        self._now, self._forks = now, dict(forks)
        mark, end = self._reader.mark(), time.monotonic() + DRAIN_DEADLINE_S
        while not self._reader.caught_up(mark) and time.monotonic() < end:
            waiting("what stands in the regions' streams")
            self._poll(block_ms=self._block_ms, give_back=False)
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
        self._now, self._forks = now, dict(forks)  # what arrives from here on is judged by them
        self._drop(self._queue.from_the_future(now), FALSE_VERSION)
        self._drop(self._queue.sweep(now, forks, self._max_age), AGE)
        if len(self._queue) >= self._batch_groups:
            # Even when enough waits here: what stands in a stream unseen keeps a lease that nobody renews.
            self._poll(block_ms=1, give_back=True)
        while not stop():
            batch = self._queue.take(self._batch_groups)
            if batch is not None:
                dropped, self._dropped = dict(self._dropped), Counter()
                return FedBatch(batch, dropped, time.monotonic() - started)
            elapsed = time.monotonic() - started
            if elapsed > deadline_s:
                raise DeadlineError.waiting_for(self._lacking(), elapsed, self._why())
            waiting(self._lacking() + (f"; {why}" if elapsed > WHY_AFTER_S and (why := self._why()) else ""))
            self._poll(block_ms=self._block_ms, give_back=True)
        return None

    def consumed(
        self, arrivals: Iterable[Arrival], *, zero_variance: Collection[int] = (), gated: Collection[int] = ()
    ) -> None:
        """The optimizer step that consumed these groups of a batch is done; `zero_variance`: indices of those that gave no
        gradient, `gated`: of those that a gate kept from the weights. They are settled after the next `checkpointed`."""
        for arrival in arrivals:
            index = arrival.group.group_index
            fate = GATE if index in gated else ZERO_VARIANCE if index in zero_variance else TRAINED
            self._consumed.append((arrival, fate_record(arrival, fate, self._now, self._forks)))
            if fate != TRAINED:
                self._dropped[_cause(fate)] += 1

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold so that nothing is trained twice or lost; plain JSON."""
        consumed = [Ending(record, self._queue.entries(arrival)).plain() for arrival, record in self._consumed]
        return {
            "trained_below": self.trained.below,
            "trained_beyond": sorted(self.trained.beyond),
            "abandoned": sorted(self.trained.abandoned),
            "to_settle": self._book.state() + consumed,
            "fate_log": list(self._fates.position),
        }

    def checkpointed(self, state: Mapping[str, Any] | None = None) -> None:
        """A checkpoint holding `state`, a result of `state()`, is durable: what had been consumed then has its fate, and what
        was consumed since waits for the next. None: nothing was since. Acknowledgements go out at once where a region can be
        reached, else when it is back."""
        held = None if state is None else _identities(state)
        durable = [(a, record) for a, record in self._consumed if held is None or record.identity in held]
        self._consumed = [] if held is None else [(a, r) for a, r in self._consumed if r.identity not in held]
        self._book.end(Ending(record, self._queue.release(arrival)) for arrival, record in durable)
        self._book.flush(at_once=True)
        try:
            self.trained.skip(self._permits.abandoned())
        except StreamUnavailableError:  # the next checkpoint asks again
            self._log.debug("abandoned groups are not known now")

    def drop_surplus(self, now: PolicyVersion, forks: Forks, *, waiting: Callable[[str], None] = lambda _: None) -> int:
        """The run is over: everything that still waits is dropped. Returns how many groups."""
        self.drain_backlog(now, forks, waiting=waiting)
        rest = self._queue.clear()
        self._drop(rest, SURPLUS, give_back=False)
        self.flush(deadline_s=SETTLE_DEADLINE_S, waiting=waiting)
        return len(rest)

    def flush(self, *, deadline_s: float = SETTLE_DEADLINE_S, waiting: Callable[[str], None] = lambda _: None) -> bool:
        """Wait until all fates decided so far are logged, and settled where the region can be reached."""
        self._book.flush(at_once=True)
        end = time.monotonic() + deadline_s
        while not (done := self._reader.flush(deadline_s=min(BEAT_S, deadline_s))) and time.monotonic() < end:
            self._heartbeat()
            waiting("the regions' Redis, to acknowledge what has ended")
        done = done and not self._book.error
        if not done:
            self._log.warning("not everything could be acknowledged", groups=len(self._book), error=self._book.error)
        return done

    def close(self) -> None:
        """End the reader's threads; the fate log can be opened by another."""
        self._reader.close()
        self._fates.close()

    def _poll(self, *, block_ms: int, give_back: bool) -> None:
        self._heartbeat()
        self._book.flush()
        polled = self._reader.poll(block_ms=block_ms)
        arrived: list[int] = []
        dropped: dict[str, list[Arrival]] = {}
        for arrival in polled.arrivals:
            if self._book.again(arrival):
                continue
            fate = None if self._queue.knows(arrival) else self._refuse(arrival)
            verdict = self._queue.offer(_admitted(arrival)) if fate is None else None
            if verdict is Verdict.DUPLICATE:
                fate = DUPLICATE
            if verdict in (Verdict.QUEUED, Verdict.DUPLICATE):  # nobody need sample it any more
                arrived.append(arrival.group.group_index)
            if fate is not None:
                dropped.setdefault(fate, []).append(arrival)
        if arrived:
            self._hub(lambda: self._permits.settle(arrived))
        for fate, arrivals in dropped.items():
            self._drop(arrivals, fate, give_back=give_back and fate != DUPLICATE)
        self._bury(polled.dead, give_back=give_back)

    def _refuse(self, arrival: Arrival) -> str | None:
        if claims_the_future(arrival, self._now):
            return FALSE_VERSION
        return AGE if group_age(arrival, self._now, self._forks) > self._max_age else None

    def _bury(self, dead: list[DeadLetter], *, give_back: bool) -> None:
        """Their region's thread has settled them: dead letters have no line in the fate log."""
        if dead:
            self._dropped[DEAD_LETTER] += len(dead)
        if give_back:
            self._give_back(d.group_index for d in dead if d.group_index is not None)

    def _drop(self, arrivals: list[Arrival], fate: str, *, give_back: bool = True) -> None:
        if not arrivals:
            return
        if fate == FALSE_VERSION:
            self._log.warning("groups claim weights that do not exist", groups=len(arrivals), now=str(self._now))
        if give_back:
            attempts: dict[int, int] = {}  # newest of each index: one that is sampled again already goes on
            for group in (a.group for a in arrivals):
                attempts[group.group_index] = max(group.attempt, attempts.get(group.group_index, 0))
            self._give_back(attempts, attempts)
        self._dropped[_cause(fate)] += len(arrivals)
        self._book.end(Ending(fate_record(a, fate, self._now, self._forks), self._queue.release(a)) for a in arrivals)

    def _give_back(self, indices: Iterable[int], attempts: Mapping[int, int] | None = None) -> None:
        queued = self._queue.indices
        again = [g for g in indices if g not in self.trained and g not in queued]
        if again:
            self._hub(lambda: self._permits.give_back(again, attempts=attempts))

    def _hub(self, call: Callable[[], None]) -> None:
        what = "the hub's Redis, to account for permits"
        retry_on = (StreamUnavailableError, BackpressureError)
        retry_until(
            call, deadline_s=self._hub_deadline_s, what=what, retry_on=retry_on, sleep=sleep_alive(self._heartbeat)
        )

    def _lacking(self) -> str:
        health, away = self._reader.health(), self._reader.unreachable()
        what = [f"{self._batch_groups - len(self._queue)} more groups of {self._batch_groups}"]
        what += [f"region {name} {health[name]}" for name in away]
        return "; ".join([*what, *filter(None, [self._book.error])])


def _identities(state: Mapping[str, Any]) -> set[Identity]:
    return {FateRecord.model_validate(ending["record"]).identity for ending in state.get("to_settle", ())}


def _admitted(arrival: Arrival) -> Arrival:
    return replace(arrival, admitted_ms=time.time_ns() // 1_000_000)


def _cause(fate: str) -> str:
    return fate.removeprefix("dropped:")
