"""Reads the trajectory streams of all regions and hands out verified groups.

Invariant: a region that stops answering holds up the others once, by the socket time-out, and then no more: a thread
of its own asks, with growing pauses, whether it answers again, and its state is visible (`health`). Every delivery
comes back exactly once from `poll`: as an `Arrival`, or as a dead letter (settled in its stream with its cause).
Held by tests/unit/consumers/test_reader.py.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from anabranch.schemas.config import StreamSection
from anabranch.schemas.envelope import open_envelope
from anabranch.schemas.errors import BackpressureError, StreamUnavailableError, TrajectoryError, WireError
from anabranch.schemas.trajectory import Group, decode_group
from anabranch.transport.stream import Delivery, TrajectoryStream

MAX_ENTRIES_PER_READ = 64
RETRY_FIRST_S = 0.5
RETRY_LAST_S = 10.0


class RegionState(enum.Enum):
    RESUMING = "resuming"  # reading what was delivered to us before a restart
    READING = "reading"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A verified group and where to acknowledge it."""

    region: str
    entry_id: str
    group: Group
    size_bytes: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An entry that was set aside; `group_index` is None when not even that could be read."""

    region: str
    cause: str
    group_index: int | None


class _Probe(threading.Thread):
    """Asks a region that was lost whether it answers, so that nobody else waits for the answer."""

    def __init__(self, stream: TrajectoryStream, group: str) -> None:
        super().__init__(name="reader-probe", daemon=True)
        self._stream, self._group = stream, group
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._stream.ledger(self._group)
        except Exception as error:  # noqa: BLE001 - handed to the thread that polls, which judges it
            self.error = error


@dataclass(slots=True)
class _Region:
    stream: TrajectoryStream
    state: RegionState = RegionState.RESUMING
    resume_after: str | None = "0-0"  # None once what was delivered before a restart is read
    unopened: deque[Delivery] = field(default_factory=deque)
    probe: _Probe | None = None
    retry_at_s: float = 0.0
    retry_pause_s: float = RETRY_FIRST_S
    last_claim_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Polled:
    arrivals: list[Arrival] = field(default_factory=list)
    dead: list[DeadLetter] = field(default_factory=list)


class Reader:
    """One consumer of `group` over several regions."""

    def __init__(
        self,
        streams: Mapping[str, TrajectoryStream],
        *,
        run: str,
        group: str,
        consumer: str,
        config: StreamSection,
        vocabulary: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`vocabulary`: number of token ids the model knows; a group with another one is a dead letter, since it would
        kill whoever looks it up, and come again."""
        self._regions = {name: _Region(stream) for name, stream in sorted(streams.items())}
        self._run, self._group, self._consumer, self._config = run, group, consumer, config
        self._vocabulary, self._clock = vocabulary, clock
        self._log = structlog.get_logger().bind(consumer_group=group)

    def health(self) -> dict[str, RegionState]:
        return {name: region.state for name, region in self._regions.items()}

    def unreachable(self) -> dict[str, str]:
        """Region -> why, for those that cannot be reached now."""
        return {n: r.error for n, r in self._regions.items() if r.state is RegionState.UNREACHABLE}

    def poll(self, *, block_ms: int) -> Polled:
        """One round over all regions that answer, waiting at most about `block_ms` in total for new entries: each region
        its share, none once something has arrived."""
        polled = Polled()
        answering = [(n, r) for n, r in self._regions.items() if self._answers(n, r)]
        if not answering:
            time.sleep(min(block_ms, 50) / 1000)
        for name, region in answering:
            wait_ms = 0 if polled.arrivals or polled.dead else max(1, block_ms // len(answering))
            try:
                if not region.unopened:
                    region.unopened.extend(self._fetch(region, wait_ms))
                while region.unopened:
                    self._open(name, region, region.unopened[0], polled)
                    region.unopened.popleft()
            except (StreamUnavailableError, BackpressureError) as error:
                self._lost(name, region, error)
                continue
            region.retry_pause_s = RETRY_FIRST_S
        return polled

    def _answers(self, name: str, region: _Region) -> bool:
        """Whether `region` can be read; if it was lost, what the probe says."""
        if region.state is not RegionState.UNREACHABLE:
            return True
        if region.probe is None:
            if self._clock() >= region.retry_at_s:
                region.probe = _Probe(region.stream, self._group)
            return False
        if region.probe.is_alive():
            return False
        error, region.probe = region.probe.error, None
        if isinstance(error, StreamUnavailableError | BackpressureError):
            self._lost(name, region, error)
            return False
        if error is not None:
            raise error
        self._log.info("region is back", region=name)
        # Entries of a reply that was lost come with the next read (see TrajectoryStream.read); the rest we still hold.
        region.state = RegionState.READING if region.resume_after is None else RegionState.RESUMING
        return True

    def _fetch(self, region: _Region, wait_ms: int) -> list[Delivery]:
        if region.resume_after is not None:
            found = region.stream.read_own_pending(
                self._group, self._consumer, max_entries=MAX_ENTRIES_PER_READ, after_id=region.resume_after
            )
            if found:
                region.resume_after = found[-1].entry_id
                return found
            region.state, region.resume_after = RegionState.READING, None
        now = self._clock()
        if now - region.last_claim_s > self._config.claim_idle_ms / 2000:
            region.last_claim_s = now
            claimed = region.stream.claim_idle(
                self._group, self._consumer, idle_ms=self._config.claim_idle_ms, max_entries=MAX_ENTRIES_PER_READ
            )
            if claimed:
                return claimed
        return region.stream.read(
            self._group, self._consumer, max_entries=MAX_ENTRIES_PER_READ, block_ms=max(1, wait_ms)
        )

    def _open(self, name: str, region: _Region, delivery: Delivery, polled: Polled) -> None:
        group_index: int | None = None
        try:
            if delivery.deliveries > self._config.max_deliveries:
                raise TrajectoryError(f"delivered {delivery.deliveries} times without being settled")
            envelope = open_envelope(delivery.fields, max_entry_bytes=self._config.max_entry_bytes)
            group_index = envelope.group_index
            group = decode_group(envelope.payload)
            if (group.run, group.group_index) != (self._run, group_index):
                raise TrajectoryError(f"payload is of run {group.run!r}, group {group.group_index}")
            highest = max(int(ids.max()) for ids in (group.prompt_token_ids, *(r.token_ids for r in group.rollouts)))
            if self._vocabulary is not None and highest >= self._vocabulary:
                raise TrajectoryError(f"token id {highest} is beyond the model's vocabulary of {self._vocabulary}")
        except WireError as error:
            cause = f"{type(error).__name__}: {error}"
            region.stream.dead_letter(self._group, delivery, cause)
            self._log.warning("entry set aside", region=name, entry=delivery.entry_id, cause=cause)
            polled.dead.append(DeadLetter(name, cause, group_index))
            return
        polled.arrivals.append(Arrival(name, delivery.entry_id, group, len(envelope.payload)))

    def _lost(self, name: str, region: _Region, error: StreamUnavailableError | BackpressureError) -> None:
        if region.state is not RegionState.UNREACHABLE:
            self._log.warning("region cannot be reached", region=name, error=str(error))
        region.state = RegionState.UNREACHABLE
        region.error = str(error)
        region.retry_at_s = self._clock() + region.retry_pause_s
        region.retry_pause_s = min(2 * region.retry_pause_s, RETRY_LAST_S)
