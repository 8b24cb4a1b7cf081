"""`TrajectoryStream` over a Redis stream, on the commands that Redis 7.0 and Valkey 9 share.

Invariant: that of `stream.py`; each act is one Lua script (transport/lua/stream_*.lua), so no crash falls between an
entry and its count. A reply lost on the way back loses nothing either: what was delivered and not seen is handed out
by the next `read`. Held by tests/contract/test_stream.py and tests/contract/test_lost_replies.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import redis
from redis import exceptions

from anabranch.schemas.envelope import Envelope
from anabranch.schemas.errors import EnvelopeError, StreamUnavailableError
from anabranch.schemas.keys import LEARNER_GROUP, Keys
from anabranch.transport import scripts
from anabranch.transport.redis_client import Guard, is_missing_group
from anabranch.transport.stream import DEAD_LETTER_FATE, DEAD_LETTER_FIELDS, LOST_FATE, Delivery, LedgerCounts

T = TypeVar("T")
_MOST_PENDING = 1_000_000  # ids of one consumer looked at when searching for what a lost reply carried


class RedisStream:
    """The stream of one region, usable from several threads; closing it closes its client.

    Args:
        client: from `redis_client.connect`.
        keys: of the run.
        max_entry_bytes: larger payloads are refused before they are sent.
        what: the server's role, for messages.
    """

    def __init__(
        self, client: redis.Redis, keys: Keys, *, max_entry_bytes: int = 16 * 2**20, what: str = "the region's Redis"
    ) -> None:
        self._client = client
        self._keys = keys
        self._max_entry_bytes = max_entry_bytes
        self._guard = Guard(client, what)
        timeout_s = client.connection_pool.connection_kwargs.get("socket_timeout") or 5.0
        self._longest_block_ms = int(1000 * (timeout_s - min(1.0, timeout_s / 5)))
        self._append = scripts.load(client, "stream_append")
        self._settle = scripts.load(client, "stream_settle")
        self._dead_letter = scripts.load(client, "stream_dead_letter")
        self._own_pending = scripts.load(client, "stream_own_pending")
        self._claim = scripts.load(client, "stream_claim")
        self._trim = scripts.load(client, "stream_trim")
        self._ledger = scripts.load(client, "stream_ledger")
        self._lock = threading.Lock()  # over the two below
        self._held: dict[tuple[str, str], set[str]] = {}  # entries handed out and not settled, per (group, consumer)
        self._unsure: set[tuple[str, str]] = set()  # a reply of theirs was lost: entries may be delivered and unseen

    def append(self, envelope: Envelope) -> bool:
        if len(envelope.payload) > self._max_entry_bytes:
            raise EnvelopeError(
                f"entry {envelope.producer}/{envelope.seq} holds {len(envelope.payload)} bytes; "
                f"stream.max_entry_bytes is {self._max_entry_bytes}"
            )
        keys = [self._keys.trajectories, self._keys.seen, self._keys.ledger]
        args: list[Any] = [envelope.producer, envelope.seq]
        for name, value in envelope.seal().items():
            args += [name, value]
        # Tried once: the caller holds the entry anyway and has better to do than to wait here; it may append it again.
        return bool(self._guard.once(lambda: self._append(keys=keys, args=args)))

    def read(self, group: str, consumer: str, *, max_entries: int, block_ms: int) -> list[Delivery]:
        """See the protocol. `block_ms` of 0 does not wait; a wait is cut to stay below the socket time-out."""
        with self._lock:
            unsure = (group, consumer) in self._unsure
        if unsure:
            unseen = self._recover(group, consumer)
            if unseen:
                return unseen
        block = min(block_ms, self._longest_block_ms) or None  # 0 would block for ever

        def call() -> list[Delivery]:
            reply = self._client.xreadgroup(
                group, consumer, {self._keys.trajectories: ">"}, count=max_entries, block=block
            )
            (entries,) = reply.values() if reply else ([],)
            return [Delivery(entry_id.decode(), fields, 1) for entry_id, fields in entries]

        return self._deliver(group, consumer, call)

    def read_own_pending(self, group: str, consumer: str, *, max_entries: int, after_id: str = "0-0") -> list[Delivery]:
        found: list[Delivery] = []
        while len(found) < max_entries:
            page, last = self._own_page(group, consumer, max_entries - len(found), after_id)
            found += page
            if last == after_id:
                break
            after_id = last
        self._hold(group, consumer, found)
        return found

    def claim_idle(self, group: str, consumer: str, *, idle_ms: int, max_entries: int) -> list[Delivery]:
        args = [group, consumer, idle_ms, max_entries, _fate(group, LOST_FATE)]

        def call() -> list[Delivery]:
            return _deliveries(self._claim(keys=[self._keys.trajectories, self._keys.ledger], args=args))

        return self._deliver(group, consumer, call)

    def settle(self, group: str, fates: Sequence[tuple[str, str]]) -> int:
        if not fates:
            return 0
        args = [group, *(part for pair in fates for part in pair)]
        settled = int(
            self._guard.repeat(lambda: self._settle(keys=[self._keys.trajectories, self._keys.ledger], args=args))
        )
        self._forget(group, [entry_id for entry_id, _ in fates])
        return settled

    def dead_letter(self, group: str, delivery: Delivery, cause: str) -> None:
        keys = [self._keys.trajectories, self._keys.ledger, self._keys.dead_letters]
        args = [group, delivery.entry_id, cause, _fate(group, DEAD_LETTER_FATE), DEAD_LETTER_FIELDS]
        self._guard.repeat(lambda: self._dead_letter(keys=keys, args=args))
        self._forget(group, [delivery.entry_id])

    def trim(self) -> int:
        return int(self._guard.repeat(lambda: self._trim(keys=[self._keys.trajectories], args=[LEARNER_GROUP])))

    def ledger(self, group: str) -> LedgerCounts:
        pending, flat = self._guard.repeat(
            lambda: self._ledger(keys=[self._keys.trajectories, self._keys.ledger], args=[group])
        )
        counted = {flat[i].decode(): int(flat[i + 1]) for i in range(0, len(flat), 2)}
        return LedgerCounts(counted.pop("produced", 0), int(pending), counted)

    def close(self) -> None:
        self._client.close()

    def _deliver(self, group: str, consumer: str, call: Callable[[], list[Delivery]]) -> list[Delivery]:
        """Run `call`, which hands entries to the consumer, exactly once per reply: never repeated by itself."""
        try:
            found = self._guard.once(lambda: self._with_group(group, call))
        except StreamUnavailableError:
            with self._lock:
                self._unsure.add((group, consumer))
            raise
        self._hold(group, consumer, found)
        return found

    def _recover(self, group: str, consumer: str) -> list[Delivery]:
        """Entries delivered to the consumer in a reply that never arrived. What it already holds is not counted as
        delivered once more: else every outage would bring good entries nearer to the dead letters."""
        with self._lock:
            held = set(self._held.get((group, consumer), ()))
        key = self._keys.trajectories
        rows = self._guard.once(
            lambda: self._with_group(
                group, lambda: self._client.xpending_range(key, group, "-", "+", _MOST_PENDING, consumername=consumer)
            )
        )
        counts = {row["message_id"].decode(): int(row["times_delivered"]) for row in rows}
        unseen = [entry_id for entry_id in counts if entry_id not in held]
        claimed = (
            self._guard.once(lambda: self._client.xclaim(key, group, consumer, 0, unseen, justid=False))
            if unseen
            else []
        )
        found = [Delivery(i.decode(), fields, counts[i.decode()] + 1) for i, fields in claimed]
        self._hold(group, consumer, found)
        with self._lock:
            self._unsure.discard((group, consumer))
        return found

    def _own_page(self, group: str, consumer: str, count: int, after_id: str) -> tuple[list[Delivery], str]:
        args = [group, consumer, count, after_id, _fate(group, LOST_FATE)]

        def call() -> tuple[list[Delivery], str]:
            rows, last = self._own_pending(keys=[self._keys.trajectories, self._keys.ledger], args=args)
            return _deliveries(rows), last.decode()

        return self._guard.once(lambda: self._with_group(group, call))

    def _with_group(self, group: str, call: Callable[[], T]) -> T:
        """`call()`, after making the group if it is missing. From the beginning of the stream, also where a group was
        lost: what comes twice is found by its (producer, seq), what is skipped is gone."""
        try:
            return call()
        except exceptions.ResponseError as error:
            if not is_missing_group(error):
                raise
        try:
            self._client.xgroup_create(self._keys.trajectories, group, id="0", mkstream=True)
        except exceptions.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):  # another consumer was faster
                raise
        return call()

    def _hold(self, group: str, consumer: str, found: Sequence[Delivery]) -> None:
        with self._lock:
            self._held.setdefault((group, consumer), set()).update(d.entry_id for d in found)

    def _forget(self, group: str, entry_ids: Sequence[str]) -> None:
        with self._lock:
            for (held_group, _), held in self._held.items():
                if held_group == group:
                    held.difference_update(entry_ids)


def _deliveries(rows: Sequence[tuple[bytes, list[bytes], int]]) -> list[Delivery]:
    return [
        Delivery(entry_id.decode(), dict(zip(flat[::2], flat[1::2], strict=True)), int(count))
        for entry_id, flat, count in rows
    ]


def _fate(group: str, fate: str) -> str:
    """The ledger counts the learner's group alone."""
    return fate if group == LEARNER_GROUP else ""
