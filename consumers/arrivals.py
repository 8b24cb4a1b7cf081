"""What a delivery turns out to be: a verified group, or a dead letter with its cause.

Invariant: `Opener.open` never raises for what an entry holds; an `Arrival` it returns is of this run, well formed, and of
tokens that the model knows. Its arrays are views into the received bytes. Held by tests/unit/consumers/test_reader.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from anabranch.schemas.config import StreamSection
from anabranch.schemas.envelope import open_envelope
from anabranch.schemas.errors import TrajectoryError, WireError
from anabranch.schemas.fates import Identity
from anabranch.schemas.trajectory import Group, decode_group
from anabranch.transport.stream import Delivery


@dataclass(frozen=True, slots=True)
class Arrival:
    """A verified group, and where to acknowledge it. `producer` and `seq` name the delivery: a server that forgot its last
    second gets the same one again, and gives it another `entry_id`. Unix times by our clock: `delivered_ms`, it was read and
    verified; `admitted_ms`, it was taken among those that wait for a batch, 0 until then."""

    region: str
    entry_id: str
    producer: str
    seq: int
    group: Group
    size_bytes: int
    delivered_ms: int = 0
    admitted_ms: int = 0

    @property
    def identity(self) -> Identity:
        return (self.region, self.producer, self.seq)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An entry that was set aside; `group_index` is None when not even that could be read."""

    region: str
    cause: str
    group_index: int | None


@dataclass(frozen=True, slots=True)
class Polled:
    arrivals: list[Arrival] = field(default_factory=list)
    dead: list[DeadLetter] = field(default_factory=list)


class Opener:
    """`vocabulary`: number of token ids the model knows; a group with another one is a dead letter, since it would kill
    whoever looks it up, and come again."""

    def __init__(
        self,
        *,
        run: str,
        config: StreamSection,
        vocabulary: int | None = None,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._run, self._config, self._vocabulary, self._clock_ms = run, config, vocabulary, clock_ms

    def open(self, region: str, delivery: Delivery) -> Arrival | DeadLetter:
        group_index: int | None = None
        try:
            if delivery.deliveries > self._config.max_deliveries:
                raise TrajectoryError(f"delivered {delivery.deliveries} times without being settled")
            envelope = open_envelope(delivery.fields, max_entry_bytes=self._config.max_entry_bytes)
            group_index = envelope.group_index
            group = decode_group(envelope.payload)
            self._check(group, group_index)
        except WireError as error:
            return DeadLetter(region, f"{type(error).__name__}: {error}", group_index)
        size = len(envelope.payload)
        return Arrival(region, delivery.entry_id, envelope.producer, envelope.seq, group, size, self._clock_ms())

    def _check(self, group: Group, group_index: int) -> None:
        if (group.run, group.group_index) != (self._run, group_index):
            raise TrajectoryError(f"payload is of run {group.run!r}, group {group.group_index}")
        if self._vocabulary is not None and (highest := group.highest_token_id) >= self._vocabulary:
            raise TrajectoryError(f"token id {highest} is beyond the model's vocabulary of {self._vocabulary}")
