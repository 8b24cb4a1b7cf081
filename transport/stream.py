"""The trajectory stream of one region, as a protocol with two implementations that pass one contract suite:
`RedisStream` and `MemoryStream`.

Invariant: an appended entry is delivered to every consumer group until that group acknowledges it, whoever
dies in between; a (producer, seq) is stored once, and a producer is told when the server has forgotten some;
`produced + foreign = sum of fates + pending` holds for the learner's group at every instant (appending and counting are
one atomic act, and so are acknowledging and counting the fate), unless somebody deletes entries from the stream.
Held by tests/contract/test_stream.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from anabranch.schemas.envelope import Envelope

DEAD_LETTER_FATE = "dropped:dead_letter"
DEAD_LETTER_FIELDS = 32  # copied at most; an entry of ours has far fewer
LOST_FATE = "dropped:lost"  # somebody outside the pipeline deleted a delivered entry's data


@dataclass(frozen=True, slots=True)
class Delivery:
    """An entry as a consumer group received it. `fields` is unverified (see `schemas.envelope.open_envelope`)."""

    entry_id: str
    fields: Mapping[bytes, bytes]
    deliveries: int  # how often it was delivered to this group, this time included


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Groups of one region: `produced` ever appended by producers, `foreign` added by somebody else (counted by the server:
    all entries ever added, less ours; with them what the learner's group gets a second time because somebody destroyed
    it), `fates` by name ("trained", "dropped:age", ...), `pending` counted independently from the stream (undelivered +
    delivered but not acknowledged)."""

    produced: int
    pending: int
    fates: dict[str, int] = field(default_factory=dict)
    foreign: int = 0

    @property
    def balanced(self) -> bool:
        return self.produced + self.foreign == self.pending + sum(self.fates.values())


@dataclass(frozen=True, slots=True)
class ProducerProgress:
    """What a stream knows of one producer. `next_seq`: one past the highest stored, None if it knows nothing of it;
    `lowest_open`: lowest stored sequence number that the learner's group has not settled, None if there is none; `idle_ms`: since
    it last appended something new, by the server's clock, None if that is not known."""

    next_seq: int | None
    lowest_open: int | None
    idle_ms: int | None = field(default=None, compare=False)

    @property
    def settled_below(self) -> int:
        """All sequence numbers below are settled (0: none that it knows of)."""
        return self.lowest_open if self.lowest_open is not None else (self.next_seq or 0)


@dataclass(frozen=True, slots=True)
class GroupLag:
    """A consumer group's place: entries it has not read, and has read and not acknowledged; `idle_ms`: since a consumer of it
    last asked (Redis 7.0: last asked and got something), None if it has none."""

    name: str
    undelivered: int
    pending: int
    idle_ms: int | None


@dataclass(frozen=True, slots=True)
class StreamState:
    """`bytes_used`: what the server says the stream takes, about."""

    entries: int
    bytes_used: int
    groups: tuple[GroupLag, ...] = ()


class TrajectoryStream(Protocol):
    """All methods raise StreamUnavailableError when the server cannot be reached, BackpressureError when it is full."""

    def append(self, envelopes: Sequence[Envelope], *, floor: int) -> int:
        """Store `envelopes` of one producer, consecutive and ascending in `seq`, each once and in order, in one round trip.

        `floor` is the lowest sequence number that the caller still holds: a stream that knows nothing of the producer begins
        there. Returns the sequence number that the stream expects next: one past the last given when all are stored (now or
        earlier); lower when the server has forgotten entries that it once took: they are to be given again, from there.
        After any error the same envelopes may be appended again.

        Raises EnvelopeError: a payload is over `stream.max_entry_bytes` (nothing of the call is stored).
        """
        ...

    def progress(self, producer: str) -> ProducerProgress: ...

    def forget_producer(self, producer: str) -> bool:
        """The producer is gone for good and holds nothing any more; False (and nothing done) while entries of it are open."""
        ...

    def read(self, group: str, consumer: str, *, max_entries: int, block_ms: int) -> list[Delivery]:
        """New entries for `consumer`, waiting up to `block_ms` for the first; the group is created if missing,
        from the beginning of the stream. After a StreamUnavailableError the next `read` first hands out entries that
        were delivered in the reply that was lost."""
        ...

    def read_own_pending(self, group: str, consumer: str, *, max_entries: int, after_id: str = "0-0") -> list[Delivery]:
        """Entries delivered to `consumer` earlier and not acknowledged, in order, beyond `after_id` (a restart begins here)."""
        ...

    def claim_idle(self, group: str, consumer: str, *, idle_ms: int, max_entries: int) -> list[Delivery]:
        """Take over entries that another consumer of the group has left unacknowledged for `idle_ms`."""
        ...

    def look(self, *, after_id: str = "0-0", max_entries: int) -> list[Delivery]:
        """Entries beyond `after_id` in order, for somebody who only looks: no group learns of it, and `deliveries` is 0."""
        ...

    def settle(self, group: str, fates: Sequence[tuple[str, str]]) -> int:
        """Acknowledge `(entry_id, fate)` pairs and count each fate, atomically; a pair settled before is not counted
        again. Fates are "trained" or "dropped:<cause>"; for groups other than the learner's, fate "" counts nothing.
        Returns how many were newly settled."""
        ...

    def dead_letter(self, group: str, delivery: Delivery, cause: str) -> None:
        """Copy the entry (its first `DEAD_LETTER_FIELDS` fields) to the dead-letter stream with its cause and settle it,
        atomically and once; for the learner's group it counts as "dropped:dead_letter"."""
        ...

    def trim(self) -> int:
        """Remove entries that every consumer group has acknowledged; returns how many. Nothing goes while the
        learner's group has never read. What the learner can never be given, because somebody deleted it from the stream
        before it was delivered, is settled as `LOST_FATE`: no producer waits for it."""
        ...

    def ledger(self, group: str) -> LedgerCounts: ...

    def state(self) -> StreamState: ...

    def forget_group(self, group: str) -> bool:
        """A reader of another group is gone for good: nothing waits for it any more. False if there is no such group.
        Raises UsageError for the learner's group."""
        ...

    def close(self) -> None: ...
