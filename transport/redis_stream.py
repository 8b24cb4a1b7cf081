"""`TrajectoryStream` over a Redis stream, on the commands that Redis 7.0 and Valkey 9 share.

Invariant: that of `stream.py`; each act is one Lua script (transport/lua/stream_*.lua), so no crash falls between an
entry and its count. A reply lost on the way back loses nothing either: what was delivered and not seen is handed out
by the next `read`, and what a server forgot that was acknowledged (it restarted between two calls, which a client does not
notice) within `VERIFY_EVERY_S`. Held by tests/contract/test_stream.py, tests/contract/test_lost_replies.py and
tests/process/test_reader_outages.py.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import redis
from redis import exceptions

from anabranch.schemas.envelope import Envelope
from anabranch.schemas.errors import AnabranchError, StreamUnavailableError, UsageError
from anabranch.schemas.keys import LEARNER_GROUP, Keys
from anabranch.transport import scripts
from anabranch.transport.held_entries import HeldEntries
from anabranch.transport.redis_client import Guard, is_missing_group, whole_number
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
from anabranch.transport.stream_rules import check_append, counted_fate

T = TypeVar("T")
VERIFY_EVERY_S = 5.0
_MOST_PENDING = 1_000_000  # ids of one consumer looked at when searching for what a lost reply carried


class RedisStream:
    """The stream of one region, usable from several threads; closing it closes its client.

    Args:
        client: from `redis_client.connect`.
        keys: of the run.
        max_entry_bytes: larger payloads are refused before they are sent.
        max_dead_letters: kept; the oldest make room.
        what: the server's role, for messages.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        *,
        max_entry_bytes: int = 16 * 2**20,
        max_dead_letters: int = 1_000,
        what: str = "the region's Redis",
    ) -> None:
        self._client = client
        self._stream, self._ledger = keys.trajectories, keys.ledger
        self._max_entry_bytes, self._max_dead_letters = max_entry_bytes, max_dead_letters
        self._guard = Guard(client, what)
        timeout_s = client.connection_pool.connection_kwargs.get("socket_timeout") or 5.0
        self._longest_block_ms = int(1000 * (timeout_s - min(1.0, timeout_s / 5)))
        self._scripts = stream_scripts(client, keys)
        self._held = HeldEntries()
        self._verified_s: dict[tuple[str, str], float] = {}

    def append(self, envelopes: Sequence[Envelope], *, floor: int) -> int:
        """See the protocol. Tried once: the caller holds the entries anyway and has better to do than to wait here."""
        if not envelopes:
            return floor
        check_append(envelopes, floor, self._max_entry_bytes)
        producer, seqs = envelopes[0].producer, [envelope.seq for envelope in envelopes]
        calls = [[producer, floor, done, coming] for done, coming in zip(["", *seqs], [*seqs, ""], strict=True)]
        entries = [
            ["XADD", self._stream, "NOMKSTREAM", "*", *(part for field in e.seal().items() for part in field)]
            for e in envelopes
        ]
        expected: int = self._guard.once(lambda: self._scripts.between("stream_append", calls, entries))[-1]
        return min(expected, envelopes[-1].seq + 1)

    def progress(self, producer: str) -> ProducerProgress:
        reply = self._repeat("stream_progress", producer)
        return self._guard.understand("what it knows of a producer", lambda: _progress(reply))

    def forget_producer(self, producer: str) -> bool:
        return bool(self._repeat("stream_forget_producer", producer))

    def read(self, group: str, consumer: str, *, max_entries: int, block_ms: int) -> list[Delivery]:
        """See the protocol. `block_ms` of 0 does not wait; a wait is cut to stay below the socket time-out."""
        if self._held.is_unsure(group, consumer) or self._to_be_verified(group, consumer):
            unseen = self._recover(group, consumer)
            if unseen:
                return unseen
        block = min(block_ms, self._longest_block_ms) or None  # 0 would block for ever

        def call() -> list[Delivery]:
            reply = self._client.xreadgroup(group, consumer, {self._stream: ">"}, count=max_entries, block=block)
            (entries,) = reply.values() if reply else ([],)
            return [Delivery(entry_id.decode(), fields, 1) for entry_id, fields in entries]

        return self._deliver(group, consumer, call)

    def read_own_pending(self, group: str, consumer: str, *, max_entries: int, after_id: str = "0-0") -> list[Delivery]:
        found: list[Delivery] = []
        while len(found) < max_entries:
            args = (group, consumer, max_entries - len(found), after_id, counted_fate(group, LOST_FATE))
            call = functools.partial(self._scripts.run, "stream_own_pending", *args)
            rows, last = self._guard.once(functools.partial(self._with_group, group, call))
            found += _deliveries(rows)
            if last.decode() == after_id:
                break
            after_id = last.decode()
        self._hold(group, consumer, found)
        return found

    def claim_idle(self, group: str, consumer: str, *, idle_ms: int, max_entries: int) -> list[Delivery]:
        args = (group, consumer, idle_ms, max_entries, counted_fate(group, LOST_FATE))
        return self._deliver(group, consumer, lambda: _deliveries(self._scripts.run("stream_claim", *args)))

    def look(self, *, after_id: str = "0-0", max_entries: int) -> list[Delivery]:
        rows = self._guard.repeat(lambda: self._client.xrange(self._stream, min=f"({after_id}", count=max_entries))
        return [Delivery(entry_id.decode(), fields or {}, 0) for entry_id, fields in rows]

    def settle(self, group: str, fates: Sequence[tuple[str, str]]) -> int:
        if not fates:
            return 0
        pairs = [(entry_id, counted_fate(group, fate)) for entry_id, fate in fates]
        settled = int(self._repeat("stream_settle", group, *(part for pair in pairs for part in pair)))
        self._held.forget(group, [entry_id for entry_id, _ in pairs])
        return settled

    def dead_letter(self, group: str, delivery: Delivery, cause: str) -> None:
        fate = counted_fate(group, DEAD_LETTER_FATE)
        self._repeat(
            "stream_dead_letter", group, delivery.entry_id, cause, fate, DEAD_LETTER_FIELDS, self._max_dead_letters
        )
        self._held.forget(group, [delivery.entry_id])

    def trim(self) -> int:
        return int(self._repeat("stream_trim", LEARNER_GROUP, LOST_FATE))

    def ledger(self, group: str) -> LedgerCounts:
        pending, foreign, flat = self._repeat("stream_ledger", group)
        names = (name.decode("utf-8", "backslashreplace") for name in flat[::2])
        counted = self._guard.understand(
            self._ledger, lambda: dict(zip(names, map(whole_number, flat[1::2]), strict=True))
        )
        fates = {name: n for name, n in counted.items() if n and (name == "trained" or name.startswith("dropped:"))}
        return LedgerCounts(counted.get("produced", 0), int(pending), fates, int(foreign))

    def state(self) -> StreamState:
        entries, bytes_used, *groups = self._repeat("stream_state")
        lags = (
            GroupLag(
                name.decode("utf-8", "backslashreplace"),
                int(undelivered),
                int(pending),
                int(idle) if idle >= 0 else None,
            )
            for name, undelivered, pending, idle in groups
        )
        return StreamState(int(entries), int(bytes_used), tuple(lags))

    def forget_group(self, group: str) -> bool:
        if group == LEARNER_GROUP:
            raise UsageError(f"{group!r} is the learner's group: what it has not settled would be lost")
        self._held.forget_group(group)
        return bool(self._repeat("stream_forget_group", group))

    def close(self) -> None:
        self._client.close()

    def _repeat(self, name: str, *args: Any) -> Any:
        return self._guard.repeat(lambda: self._scripts.run(name, *args))

    def _deliver(self, group: str, consumer: str, call: Callable[[], list[Delivery]]) -> list[Delivery]:
        """Run `call`, which hands entries to the consumer, exactly once per reply: never repeated by itself."""
        try:
            found = self._guard.once(lambda: self._with_group(group, call))
        except StreamUnavailableError:
            self._held.doubt(group, consumer)
            raise
        self._hold(group, consumer, found)
        return found

    def _to_be_verified(self, group: str, consumer: str) -> bool:
        since_s = self._verified_s.setdefault((group, consumer), time.monotonic())
        return time.monotonic() - since_s >= VERIFY_EVERY_S

    def _recover(self, group: str, consumer: str) -> list[Delivery]:
        """Entries delivered to the consumer in a reply that never arrived, or whose acknowledgement the server forgot. What it already holds is not counted as
        delivered once more: else every outage would bring good entries nearer to the dead letters."""
        counts = self._guard.once(lambda: self._with_group(group, lambda: self._pending(group, consumer)))
        self._held.keep(group, consumer, counts)
        held = self._held.of(group, consumer)
        unseen = [entry_id for entry_id in counts if entry_id not in held]
        claimed = (
            self._guard.once(lambda: self._client.xclaim(self._stream, group, consumer, 0, unseen, justid=False))
            if unseen
            else []
        )
        found = [Delivery(i.decode(), fields, counts[i.decode()] + 1) for i, fields in claimed]
        self._held.add(group, consumer, [d.entry_id for d in found])
        self._held.trust(group, consumer)
        self._verified_s[group, consumer] = time.monotonic()
        return found

    def _pending(self, group: str, consumer: str) -> dict[str, int]:
        """Id of each entry that waits for the consumer's acknowledgement -> how often it was delivered."""
        rows = self._client.xpending_range(self._stream, group, "-", "+", _MOST_PENDING, consumername=consumer)
        return {row["message_id"].decode(): int(row["times_delivered"]) for row in rows}

    def _with_group(self, group: str, call: Callable[[], T]) -> T:
        """`call()`, after making the group if it is missing."""
        try:
            return call()
        except exceptions.ResponseError as error:
            if not is_missing_group(error):
                raise
        self._scripts.run("stream_make_group", group, counted_fate(group, LOST_FATE))
        return call()

    def _hold(self, group: str, consumer: str, found: Sequence[Delivery]) -> None:
        if self._held.add(group, consumer, [d.entry_id for d in found]):
            # Others may have claimed or settled some of them. If the server does not say now, it is asked next time: what
            # was found must not be lost over this.
            with contextlib.suppress(AnabranchError):
                self._held.keep(group, consumer, self._guard.once(lambda: self._pending(group, consumer)))


def stream_scripts(client: redis.Redis, keys: Keys) -> scripts.Scripts:
    """The scripts over the keys that lua/stream_prelude.lua names."""
    names = [
        keys.trajectories, keys.seen, keys.ledger, keys.open_entries, keys.open_ids, keys.dead_letters, keys.seen_at,
    ]  # fmt: skip
    return scripts.Scripts(client, names, prelude="stream_prelude")


def _deliveries(rows: Sequence[tuple[bytes, list[bytes], int]]) -> list[Delivery]:
    return [
        Delivery(entry_id.decode(), dict(zip(flat[::2], flat[1::2], strict=True)), int(count))
        for entry_id, flat, count in rows
    ]


def _progress(reply: Sequence[bytes]) -> ProducerProgress:
    last, lowest, idle_ms = (whole_number(part) if part else None for part in reply)
    return ProducerProgress(None if last is None else last + 1, lowest, idle_ms)
