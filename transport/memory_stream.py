"""`TrajectoryStream` in memory: the public twin of `RedisStream`, for tests and for runs inside one process.

Invariant: that of `stream.py`. Several `MemoryStream`s over one `MemoryStreamStore` see one stream, from any thread.
Held by tests/contract/test_stream.py, the same suite that RedisStream passes.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from anabranch.schemas.envelope import Envelope
from anabranch.schemas.errors import EnvelopeError
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.transport.stream import DEAD_LETTER_FATE, DEAD_LETTER_FIELDS, LOST_FATE, Delivery, LedgerCounts

_Id = tuple[int, int]


@dataclass(slots=True)
class _Pending:
    consumer: str
    delivered_s: float
    deliveries: int


@dataclass(slots=True)
class _Group:
    last: _Id = (0, 0)
    pending: dict[_Id, _Pending] = field(default_factory=dict)


class MemoryStreamStore:
    """What the streams share: the "server" of one region. `clock` gives seconds, for idle times."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.changed = threading.Condition(threading.RLock())
        self.entries: dict[_Id, Mapping[bytes, bytes]] = {}  # ascending, since ids ascend
        self.groups: dict[str, _Group] = {}
        self.seen: dict[str, int] = {}
        self.produced = 0
        self.fates: dict[str, int] = {}
        self.dead_letters: list[dict[bytes, bytes]] = []
        self._next = 1

    def add(self, fields: Mapping[bytes, bytes]) -> str:
        """Store an entry as it is, uncounted (for tests: also a malformed one); returns its id."""
        with self.changed:
            entry = (1, self._next)
            self._next += 1
            self.entries[entry] = dict(fields)
            self.changed.notify_all()
            return _text(entry)


class MemoryStream:
    def __init__(self, store: MemoryStreamStore, *, max_entry_bytes: int = 16 * 2**20) -> None:
        self._store = store
        self._max_entry_bytes = max_entry_bytes

    def append(self, envelope: Envelope) -> bool:
        if len(envelope.payload) > self._max_entry_bytes:
            raise EnvelopeError(
                f"entry {envelope.producer}/{envelope.seq} holds {len(envelope.payload)} bytes; "
                f"stream.max_entry_bytes is {self._max_entry_bytes}"
            )
        store = self._store
        with store.changed:
            if envelope.seq <= store.seen.get(envelope.producer, -1):
                return False
            store.add({name.encode(): value for name, value in envelope.seal().items()})
            store.seen[envelope.producer] = envelope.seq
            store.produced += 1
            return True

    def read(self, group: str, consumer: str, *, max_entries: int, block_ms: int) -> list[Delivery]:
        store = self._store
        end = time.monotonic() + block_ms / 1000
        with store.changed:
            state = store.groups.setdefault(group, _Group())
            while True:
                fresh = [entry for entry in store.entries if entry > state.last][:max_entries]
                left_s = end - time.monotonic()
                if fresh or left_s <= 0:
                    break
                store.changed.wait(left_s)
            for entry in fresh:
                state.last = entry
                state.pending[entry] = _Pending(consumer, store.clock(), 1)
            return [Delivery(_text(entry), store.entries[entry], 1) for entry in fresh]

    def read_own_pending(self, group: str, consumer: str, *, max_entries: int, after_id: str = "0-0") -> list[Delivery]:
        with self._store.changed:
            pending = self._store.groups.setdefault(group, _Group()).pending
            after = _parse(after_id)
            own = sorted(entry for entry, p in pending.items() if p.consumer == consumer and entry > after)
            return self._redeliver(group, consumer, own, max_entries)

    def claim_idle(self, group: str, consumer: str, *, idle_ms: int, max_entries: int) -> list[Delivery]:
        with self._store.changed:
            pending = self._store.groups.setdefault(group, _Group()).pending
            before = self._store.clock() - idle_ms / 1000
            idle = sorted(entry for entry, p in pending.items() if p.consumer != consumer and p.delivered_s <= before)
            return self._redeliver(group, consumer, idle, max_entries)

    def _redeliver(self, group: str, consumer: str, entries: Sequence[_Id], limit: int) -> list[Delivery]:
        store = self._store
        found: list[Delivery] = []
        for entry in entries:
            if len(found) == limit:
                break
            if entry not in store.entries:
                self.settle(group, [(_text(entry), _fate(group, LOST_FATE))])
                continue
            row = store.groups[group].pending[entry]
            row.consumer, row.delivered_s, row.deliveries = consumer, store.clock(), row.deliveries + 1
            found.append(Delivery(_text(entry), store.entries[entry], row.deliveries))
        return found

    def settle(self, group: str, fates: Sequence[tuple[str, str]]) -> int:
        store = self._store
        settled = 0
        with store.changed:
            pending = store.groups.setdefault(group, _Group()).pending
            for entry_id, fate in fates:
                if pending.pop(_parse(entry_id), None) is None:
                    continue
                settled += 1
                if fate:
                    store.fates[fate] = store.fates.get(fate, 0) + 1
        return settled

    def dead_letter(self, group: str, delivery: Delivery, cause: str) -> None:
        with self._store.changed:
            if self.settle(group, [(delivery.entry_id, _fate(group, DEAD_LETTER_FATE))]):
                about = {b"cause": cause.encode(), b"by": group.encode(), b"id": delivery.entry_id.encode()}
                copied = dict(itertools.islice(delivery.fields.items(), DEAD_LETTER_FIELDS))
                self._store.dead_letters.append({**about, **copied})

    def trim(self) -> int:
        store = self._store
        with store.changed:
            if LEARNER_GROUP not in store.groups:
                return 0
            low = min(min(g.pending, default=(g.last[0], g.last[1] + 1)) for g in store.groups.values())
            gone = [entry for entry in store.entries if entry < low]
            for entry in gone:
                del store.entries[entry]
            return len(gone)

    def ledger(self, group: str) -> LedgerCounts:
        store = self._store
        with store.changed:
            state = store.groups.get(group, _Group())
            undelivered = sum(entry > state.last for entry in store.entries)
            return LedgerCounts(store.produced, len(state.pending) + undelivered, dict(store.fates))

    def close(self) -> None:
        """Nothing to close: the store lives on."""


def _text(entry: _Id) -> str:
    return f"{entry[0]}-{entry[1]}"


def _parse(entry_id: str) -> _Id:
    ms, _, seq = entry_id.partition("-")
    return int(ms), int(seq or 0)


def _fate(group: str, fate: str) -> str:
    """The ledger counts the learner's group alone."""
    return fate if group == LEARNER_GROUP else ""
