"""The thread that has to do with one region: it reads ahead, sets unreadable entries aside, acknowledges, counts.

Invariant: nobody else waits for the region. What it has read and nobody took is bounded (`stream.read_ahead_bytes`, about,
and `MAX_AHEAD` entries); order inside the region is kept; a delivery leaves it once, as an `Arrival` or settled as a dead
letter. A region that is away is asked again after at most `RETRY_LAST_S`, one that refuses us after at most `REFUSED_LAST_S`;
what was to be acknowledged waits until then. Held by tests/unit/consumers/test_reader.py,
tests/unit/consumers/test_region_reader.py and tests/unit/consumers/test_region_refuses.py.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from anabranch.consumers.arrivals import Arrival, DeadLetter, Opener, Polled
from anabranch.schemas.config import StreamSection
from anabranch.schemas.errors import AnabranchError, BackpressureError, StreamUnavailableError
from anabranch.transport.stream import Delivery, LedgerCounts, TrajectoryStream

MAX_PER_READ = 256
MAX_READ_BYTES = 4 * 2**20  # about: a larger reply is slower by the byte, since its buffers do not stay in the caches
MAX_PER_CLAIM = 64
MAX_PER_SETTLE = 512
MAX_AHEAD = 4096
RETRY_FIRST_S = 0.5
RETRY_LAST_S = 3.0  # with the time a connection takes to fail, a region that is back is read within 5 s
REFUSED_LAST_S = 30.0  # a person must mend that, and the server logs each refusal
SLICE_S = 0.05
NOT_NOW = (StreamUnavailableError, BackpressureError)  # a region that is away, or takes no writes (its disk is full)


class RegionState(enum.Enum):
    CONNECTING = "connecting"  # has not answered yet
    RESUMING = "resuming"  # reading what was delivered to us before a restart
    READING = "reading"
    FULL = "full"  # has read ahead as far as it may: waits for the learner
    UNREACHABLE = "unreachable"
    REFUSING = "refusing"  # it answers, and not with what it should: credentials, its ACL, a key of another type
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class RegionHealth:
    """`for_s`: since when the region is in this state. `why`: the last failure, '' when there is none."""

    state: RegionState
    for_s: float
    why: str = ""

    def __str__(self) -> str:
        return f"{self.state.value} for {self.for_s:.0f} s" + (f" ({self.why})" if self.why else "")


@dataclass(frozen=True, slots=True)
class Counted:
    """A region's ledger and when it was read. `unsettled`: fates that were decided and not yet in it."""

    counts: LedgerCounts
    at_s: float
    unsettled: int


class RegionReader(threading.Thread):
    """`changed` guards what other threads see, and is told of every change. Methods marked [held] are called with it."""

    def __init__(
        self,
        name: str,
        stream: TrajectoryStream,
        opener: Opener,
        *,
        group: str,
        consumer: str,
        config: StreamSection,
        changed: threading.Condition,
        clock: Callable[[], float],
        ledger_every_s: float | None,
    ) -> None:
        super().__init__(name=f"reader-{name}", daemon=True)
        self.region, self._stream, self._opener = name, stream, opener
        self._group, self._consumer, self._config = group, consumer, config
        self._changed, self._clock, self._ledger_every_s = changed, clock, ledger_every_s
        self._log = structlog.get_logger().bind(consumer_group=group, region=name)
        self._closing = threading.Event()
        # Seen by other threads:
        self.died_of: BaseException | None = None
        self.refused: AnabranchError | None = None  # why, while the state is REFUSING
        self.counted: Counted | None = None
        self._state, self._state_since_s, self._why = RegionState.CONNECTING, clock(), ""
        self._ready: deque[Arrival | DeadLetter] = deque()
        self._ready_bytes = 0
        self._to_settle: deque[tuple[str, str]] = deque()
        self._fetches = self._last_empty_fetch = 0
        # This thread's own:
        self._resume_after: str | None = "0-0"  # None once what was delivered before a restart is read
        self._unopened: deque[Delivery] = deque()
        self._largest = config.max_entry_bytes  # of the entries lately read
        self._retry_at_s, self._retry_pause_s = 0.0, RETRY_FIRST_S
        self._settle_at_s = self._claim_at_s = self._ledger_at_s = 0.0
        self._to_trim = self._refused = False

    def close(self) -> None:
        """The thread ends after the call it is in; join it."""
        self._closing.set()

    def health(self) -> RegionHealth:
        """[held]"""
        return RegionHealth(self._state, max(0.0, self._clock() - self._state_since_s), self._why)

    @property
    def is_away(self) -> bool:
        return self._state in (RegionState.UNREACHABLE, RegionState.REFUSING)

    @property
    def has_something(self) -> bool:
        """[held]"""
        return bool(self._ready)

    def take(self, polled: Polled) -> None:
        """[held] Everything that was read, into `polled`."""
        for item in self._ready:
            if isinstance(item, Arrival):
                polled.arrivals.append(item)
            else:
                polled.dead.append(item)
        self._ready.clear()
        self._ready_bytes = 0

    def settle(self, fates: Sequence[tuple[str, str]]) -> None:
        """[held] Acknowledge (entry id, fate) as soon as the region can be reached."""
        self._to_settle.extend(fates)

    def unsettled(self) -> list[str]:
        """[held] Entry ids of what `settle` was given and the stream has not."""
        return [entry_id for entry_id, _ in self._to_settle]

    @property
    def fetches(self) -> int:
        """[held] How many reads have begun."""
        return self._fetches

    def caught_up(self, fetches: int) -> bool:
        """[held] Nothing waits, as a read says that began after the first `fetches`; or the region is away."""
        return not self._ready and (self.is_away or self._last_empty_fetch > fetches)

    def run(self) -> None:
        try:
            while not self._closing.is_set():
                try:
                    self._round()
                except AnabranchError as error:
                    self._lost(error)
            self._enter(RegionState.CLOSED)
        except BaseException as error:  # noqa: BLE001 - raised again where the reader is polled
            with self._changed:
                self.died_of = error
                self._changed.notify_all()

    def _round(self) -> None:
        if self.is_away:
            while self._clock() < self._retry_at_s:
                if self._closing.wait(SLICE_S):
                    return
        self._settle_what_is_due()
        self._count_if_due()
        self._open_fetched()  # a region that broke off in the midst of it
        count = self._room()
        if not count:
            if not self.is_away:
                self._enter(RegionState.FULL)
            with self._changed:
                self._changed.wait(SLICE_S)
            return
        with self._changed:
            self._fetches += 1
            number = self._fetches
        self._unopened.extend(self._fetch(count))
        self._answered()
        if self._unopened:
            self._open_fetched()
            return
        with self._changed:
            self._last_empty_fetch = number
            self._changed.notify_all()

    def _fetch(self, count: int) -> list[Delivery]:
        """What there is, waiting for it up to `stream.block_ms`."""
        if self._resume_after is not None:
            found = self._stream.read_own_pending(
                self._group, self._consumer, max_entries=count, after_id=self._resume_after
            )
            if found:
                self._resume_after = found[-1].entry_id
                return found
            self._resume_after = None
        if (now := self._clock()) >= self._claim_at_s:
            claimed = self._stream.claim_idle(
                self._group, self._consumer, idle_ms=self._config.claim_idle_ms, max_entries=min(count, MAX_PER_CLAIM)
            )
            self._claim_at_s = now + self._config.claim_idle_ms / 2000
            if claimed:
                return claimed
        return self._stream.read(self._group, self._consumer, max_entries=count, block_ms=self._config.block_ms)

    def _open_fetched(self) -> None:
        opened: list[Arrival | DeadLetter] = []
        try:
            while self._unopened:
                item = self._opener.open(self.region, self._unopened[0])
                if isinstance(item, DeadLetter):
                    self._stream.dead_letter(self._group, self._unopened[0], item.cause)
                    self._log.warning("entry set aside", entry=self._unopened[0].entry_id, cause=item.cause)
                self._unopened.popleft()
                opened.append(item)
        finally:
            if opened:
                self._hand_out(opened)

    def _hand_out(self, opened: Sequence[Arrival | DeadLetter]) -> None:
        sizes = [item.size_bytes for item in opened if isinstance(item, Arrival)]
        self._largest = max(1, self._largest // 2, *sizes)
        with self._changed:
            self._ready.extend(opened)
            self._ready_bytes += sum(sizes)
            self._changed.notify_all()

    def _room(self) -> int:
        """How many entries may be read now, at once."""
        with self._changed:
            left_bytes = self._config.read_ahead_bytes - self._ready_bytes
            left = min(MAX_PER_READ, MAX_AHEAD - len(self._ready))
        if left_bytes <= 0 or left <= 0:
            return 0
        return max(1, min(left, min(left_bytes, MAX_READ_BYTES) // self._largest))

    def _settle_what_is_due(self) -> None:
        if not (self._to_settle or self._to_trim) or self._clock() < self._settle_at_s:
            return
        try:
            while self._to_settle:
                self._settle_some()
            self._stream.trim()
            self._to_trim = self._refused = False
        except BackpressureError as error:  # what is there can be read all the same
            if not self._refused:
                self._log.warning("cannot acknowledge yet", entries=len(self._to_settle), error=str(error))
            self._refused = True
            self._settle_at_s = self._clock() + RETRY_LAST_S

    def _settle_some(self) -> None:
        with self._changed:
            fates = [self._to_settle[i] for i in range(min(len(self._to_settle), MAX_PER_SETTLE))]
        self._stream.settle(self._group, fates)
        self._to_trim = True
        with self._changed:
            for _ in fates:
                self._to_settle.popleft()
            self._changed.notify_all()

    def _count_if_due(self) -> None:
        now = self._clock()
        if self._ledger_every_s is None or now < self._ledger_at_s:
            return
        counts = self._stream.ledger(self._group)
        self._ledger_at_s = now + self._ledger_every_s
        with self._changed:
            self.counted = Counted(counts, self._clock(), len(self._to_settle))

    def _answered(self) -> None:
        if self.is_away:
            # Entries of a reply that was lost come with the next read (see TrajectoryStream.read); the rest we still hold.
            self._log.info("region is back", away_s=round(self._clock() - self._state_since_s, 1))
        self._retry_pause_s = RETRY_FIRST_S
        self._enter(RegionState.READING if self._resume_after is None else RegionState.RESUMING)

    def _lost(self, error: AnabranchError) -> None:
        away = isinstance(error, NOT_NOW)
        state = RegionState.UNREACHABLE if away else RegionState.REFUSING
        if self._state is not state:
            if away:
                self._log.warning("region cannot be reached", error=str(error))
            else:
                self._log.error("region refuses us; going on without it", error=str(error))
        pause_s = min(self._retry_pause_s, RETRY_LAST_S if away else REFUSED_LAST_S)
        self._retry_at_s, self._retry_pause_s = self._clock() + pause_s, 2 * pause_s
        self._enter(state, str(error), None if away else error)

    def _enter(self, state: RegionState, why: str = "", refused: AnabranchError | None = None) -> None:
        with self._changed:
            if state is not self._state:
                self._state, self._state_since_s = state, self._clock()
            self._why, self.refused = why, refused
            self._changed.notify_all()
