"""`TrajectoryStream` in memory: the public twin of `RedisStream`, for tests and for runs inside one process.

Invariant: that of `stream.py`. Several `MemoryStream`s over one `MemoryStreamStore` see one stream, from any thread.
Held by tests/contract/test_stream.py, the same suite that RedisStream passes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from anabranch.schemas.envelope import Envelope
from anabranch.schemas.errors import UsageError
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.transport.memory_stream_store import ConsumerGroup, Id, Letter, MemoryStreamStore, Pending, text_of
from anabranch.transport.stream import (
    DEAD_LETTER_FATE,
    DEAD_LETTER_FIELDS,
    LOST_FATE,
    Delivery,
    GroupLag,
    LedgerCounts,
    ProducerProgress,
    StreamState,
)
from anabranch.transport.stream_rules import check_append, counted_fate, parse_id

__all__ = ["MemoryStream", "MemoryStreamStore"]


class MemoryStream:
    def __init__(
        self, store: MemoryStreamStore, *, max_entry_bytes: int = 16 * 2**20, max_dead_letters: int = 1_000
    ) -> None:
        self._store = store
        self._max_entry_bytes, self._max_dead_letters = max_entry_bytes, max_dead_letters

    def append(self, envelopes: Sequence[Envelope], *, floor: int) -> int:
        if not envelopes:
            return floor
        check_append(envelopes, floor, self._max_entry_bytes)
        store, producer = self._store, envelopes[0].producer
        with store.changed:
            for envelope in envelopes:
                store.refuse_when_full()
                expected = max(store.books.seen.get(producer, -1) + 1, floor)
                if envelope.seq != expected:
                    continue
                entry_id = store.add({name.encode(): bytes(value) for name, value in envelope.seal().items()})
                store.books.seen[producer] = envelope.seq
                store.books.seen_at[producer] = store.clock()
                store.books.produced += 1
                store.note_open(entry_id, producer, envelope.seq)
            return min(max(store.books.seen.get(producer, -1) + 1, floor), envelopes[-1].seq + 1)

    def progress(self, producer: str) -> ProducerProgress:
        with self._store.changed:
            books = self._store.books
            last = books.seen.get(producer)
            lowest = min((seq for name, seq in books.open if name == producer), default=None)
            at = books.seen_at.get(producer)
            idle_ms = None if at is None else int(1000 * max(0.0, self._store.clock() - at))
            return ProducerProgress(None if last is None else last + 1, lowest, idle_ms)

    def forget_producer(self, producer: str) -> bool:
        with self._store.changed:
            if self.progress(producer).lowest_open is not None:
                return False
            self._store.books.seen.pop(producer, None)
            self._store.books.seen_at.pop(producer, None)
            return True

    def read(self, group: str, consumer: str, *, max_entries: int, block_ms: int) -> list[Delivery]:
        store = self._store
        end = time.monotonic() + block_ms / 1000
        with store.changed:
            while True:
                state = self._asked(group, consumer)
                fresh = [entry for entry in store.entries if entry > state.last][:max_entries]
                left_s = end - time.monotonic()
                if fresh or left_s <= 0:
                    break
                store.changed.wait(left_s)
            for entry in fresh:
                state.last = entry
                state.pending[entry] = Pending(consumer, store.clock(), 1)
            return [Delivery(text_of(entry), store.entries[entry], 1) for entry in fresh]

    def read_own_pending(self, group: str, consumer: str, *, max_entries: int, after_id: str = "0-0") -> list[Delivery]:
        with self._store.changed:
            pending = self._asked(group, consumer).pending
            after = parse_id(after_id)
            own = sorted(entry for entry, p in pending.items() if p.consumer == consumer and entry > after)
            return self._redeliver(group, consumer, own, max_entries)

    def claim_idle(self, group: str, consumer: str, *, idle_ms: int, max_entries: int) -> list[Delivery]:
        with self._store.changed:
            pending = self._asked(group, consumer).pending
            before = self._store.clock() - idle_ms / 1000
            idle = sorted(entry for entry, p in pending.items() if p.consumer != consumer and p.delivered_s <= before)
            return self._redeliver(group, consumer, idle, max_entries)

    def look(self, *, after_id: str = "0-0", max_entries: int) -> list[Delivery]:
        after = parse_id(after_id)
        with self._store.changed:
            found = sorted(entry for entry in self._store.entries if entry > after)[:max_entries]
            return [Delivery(text_of(entry), self._store.entries[entry], 0) for entry in found]

    def _asked(self, group: str, consumer: str) -> ConsumerGroup:
        state = self._store.group(group)
        state.asked_s[consumer] = self._store.clock()
        return state

    def _redeliver(self, group: str, consumer: str, entries: Sequence[Id], limit: int) -> list[Delivery]:
        store = self._store
        found: list[Delivery] = []
        for entry in entries:
            if len(found) == limit:
                break
            if entry not in store.entries:
                store.acknowledge(group, text_of(entry), counted_fate(group, LOST_FATE))
                continue
            row = store.group(group).pending[entry]
            row.consumer, row.delivered_s, row.deliveries = consumer, store.clock(), row.deliveries + 1
            found.append(Delivery(text_of(entry), store.entries[entry], row.deliveries))
        return found

    def settle(self, group: str, fates: Sequence[tuple[str, str]]) -> int:
        pairs = [(entry_id, counted_fate(group, fate)) for entry_id, fate in fates]
        with self._store.changed:
            return sum(self._store.acknowledge(group, entry_id, fate) for entry_id, fate in pairs)

    def dead_letter(self, group: str, delivery: Delivery, cause: str) -> None:
        store = self._store
        with store.changed:
            if not store.acknowledge(group, delivery.entry_id, counted_fate(group, DEAD_LETTER_FATE)):
                return
            fields = store.entries.get(parse_id(delivery.entry_id), {})
            copied = dict(itertools.islice(fields.items(), DEAD_LETTER_FIELDS))
            letters = store.books.letters
            letters[store.new_id()] = Letter(cause, group, delivery.entry_id, copied)
            while len(letters) > self._max_dead_letters:
                del letters[next(iter(letters))]
                store.books.made_room += 1

    def trim(self) -> int:
        store = self._store
        with store.changed:
            groups = store.books.groups
            if LEARNER_GROUP not in groups:
                return 0
            store.settle_lost()
            low = min(min(g.pending, default=(g.last[0], g.last[1] + 1)) for g in groups.values())
            gone = [entry for entry in store.entries if entry < low]
            for entry in gone:
                del store.entries[entry]
            return len(gone)

    def ledger(self, group: str) -> LedgerCounts:
        store = self._store
        with store.changed:
            fates = {name: n for name, n in store.books.fates.items() if n}
            pending = len(store.entries)
            if group in store.books.groups:
                undelivered, delivered, _ = self._lag(store.books.groups[group])
                pending = undelivered + delivered
            return LedgerCounts(store.books.produced, pending, fates, store.foreign())

    def state(self) -> StreamState:
        store = self._store
        with store.changed:
            lags = (GroupLag(name, *self._lag(group)) for name, group in store.books.groups.items())
            return StreamState(len(store.entries), store.bytes_used(), tuple(lags))

    def _lag(self, group: ConsumerGroup) -> tuple[int, int, int | None]:
        asked = max(group.asked_s.values(), default=None)
        idle_ms = None if asked is None else round(1000 * (self._store.clock() - asked))
        return sum(entry > group.last for entry in self._store.entries), len(group.pending), idle_ms

    def forget_group(self, group: str) -> bool:
        if group == LEARNER_GROUP:
            raise UsageError(f"{group!r} is the learner's group: what it has not settled would be lost")
        with self._store.changed:
            return self._store.books.groups.pop(group, None) is not None

    def close(self) -> None:
        """Nothing to close: the store lives on."""
