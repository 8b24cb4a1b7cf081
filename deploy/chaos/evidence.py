"""What is left when a chaos run has ended: fate log, streams, spools and ledgers, read raw.

Invariant: streams and ledgers are read with plain commands and the fate log as JSON lines, not with the code under test (only
the spool's files are read by their own reader); nothing is changed. An unreadable line or file is evidence too (`damage`).
Held by tests/unit/deploy/chaos/test_evidence.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import redis

from anabranch.deploy.chaos.monitor import plain
from anabranch.schemas.errors import AnabranchError
from anabranch.schemas.keys import LEARNER_GROUP, Keys


class Identity(NamedTuple):
    """Names one delivery, whatever entries carried it."""

    region: str
    producer: str
    seq: int


class FateLine(NamedTuple):
    identity: Identity
    group_index: int
    fate: str
    epoch: int


@dataclass
class RegionBooks:
    """One region's Redis at the end. `added`: entries ever added, by the server's own count; `dead`: readable identities among the
    dead letters; `open`: entries that the learner has not acknowledged, by the server's own lists."""

    produced: int = 0
    added: int = 0
    requeued: int = 0
    fates: dict[str, int] = field(default_factory=dict)
    open: Counter[Identity] = field(default_factory=Counter)
    unread: set[Identity] = field(default_factory=set)  # of the open ones: not yet delivered to it
    open_unreadable: int = 0
    dead: Counter[Identity] = field(default_factory=Counter)
    dead_letters: int = 0
    known: dict[str, int] = field(default_factory=dict)  # producer -> highest seq

    @property
    def pending(self) -> int:
        return self.open.total() + self.open_unreadable

    @property
    def foreign(self) -> int:
        return self.added - self.produced - self.requeued


@dataclass
class Evidence:
    """`last_seq`: highest sequence number that anything ever said of a producer."""

    fates: list[FateLine] = field(default_factory=list)
    spooled: Counter[Identity] = field(default_factory=Counter)
    books: dict[str, RegionBooks] = field(default_factory=dict)
    last_seq: dict[tuple[str, str], int] = field(default_factory=dict)
    consumed_by_steps: int | None = None  # steps done × groups of a step; None: unknown
    damage: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # what could not be read at all

    def saw(self, identity: Identity) -> None:
        key = (identity.region, identity.producer)
        self.last_seq[key] = max(self.last_seq.get(key, 0), identity.seq)


def read_fate_lines(folder: Path) -> tuple[list[FateLine], list[str]]:
    """Every line of RUN_DIRECTORY/fates, and what is not readable."""
    lines: list[FateLine] = []
    damage: list[str] = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
            try:
                raw = json.loads(line)
                identity = Identity(str(raw["region"]), str(raw["producer"]), int(raw["seq"]))
                lines.append(FateLine(identity, int(raw["group_index"]), str(raw["fate"]), int(raw["epoch"])))
            except (ValueError, KeyError, TypeError) as error:
                damage.append(f"{path.name} line {number}: {error!r}"[:200])
    return lines, damage


def read_spools(folder: Path, region: str) -> tuple[set[Identity], list[str]]:
    """Every whole record of the spools under `folder`, by the spool's own reader, and what is not readable."""
    from anabranch.producers.spool_load import read_spool, spool_folders

    found: set[Identity] = set()
    damage = []
    for spool in spool_folders(folder):
        try:
            found |= {Identity(region, producer, seq) for producer, seq, _, _ in read_spool(spool)}
        except (AnabranchError, OSError) as error:
            damage.append(f"spool {spool.name} of {region}: {error}")
    return found, damage


def read_books(server: redis.Redis, keys: Keys, region: str) -> RegionBooks:
    """Raises redis.RedisError."""
    books = RegionBooks()
    ledger = {name.decode(): int(count) for name, count in server.hgetall(keys.ledger).items()}
    books.produced, books.requeued = ledger.pop("produced", 0), ledger.pop("requeued", 0)
    ledger.pop("made_room", None)
    books.fates = {name: count for name, count in ledger.items() if name == "trained" or name.startswith("dropped:")}
    books.known = {name.decode(): int(seq) for name, seq in server.hgetall(keys.seen).items()}
    if server.exists(keys.dead_letters):
        books.dead_letters = int(server.xlen(keys.dead_letters))
        for _, fields in _pages(server, keys.dead_letters):
            if (identity := identity_of(region, fields)) is not None:
                books.dead[identity] += 1
    if not server.exists(keys.trajectories):
        return books
    books.added = int(plain(server.execute_command("XINFO", "STREAM", keys.trajectories))["entries-added"])
    groups = map(plain, server.execute_command("XINFO", "GROUPS", keys.trajectories))
    learner = next((g for g in groups if g["name"] == LEARNER_GROUP.encode()), None)
    last = order(learner["last-delivered-id"].decode()) if learner else (-1, 0)
    held = set()
    if learner and learner["pending"]:
        count = int(learner["pending"])
        reply = server.execute_command("XPENDING", keys.trajectories, LEARNER_GROUP, "-", "+", count)
        held = {entry[0].decode() for entry in reply}
    for entry_id, fields in _pages(server, keys.trajectories):
        if order(entry_id) <= last and entry_id not in held:
            continue
        held.discard(entry_id)
        identity = identity_of(region, fields)
        if identity is None:
            books.open_unreadable += 1
        else:
            books.open[identity] += 1
            if order(entry_id) > last:
                books.unread.add(identity)
    books.open_unreadable += len(held)  # acknowledged by nobody, and their data is gone
    return books


def identity_of(region: str, fields: Mapping[bytes, bytes]) -> Identity | None:
    try:
        return Identity(region, fields[b"producer"].decode(), int(fields[b"seq"]))
    except (KeyError, ValueError):
        return None


def order(entry_id: str) -> tuple[int, int]:
    ms, _, number = entry_id.partition("-")
    return int(ms), int(number)


def flat(fields: Any) -> dict[bytes, bytes]:
    """An entry's fields, whichever way redis-py gives them."""
    return dict(fields) if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))


def _pages(server: redis.Redis, key: str) -> list[tuple[str, dict[bytes, bytes]]]:
    found: list[tuple[str, dict[bytes, bytes]]] = []
    start = "-"
    while page := server.execute_command("XRANGE", key, start, "+", "COUNT", 200):
        found += [(entry_id.decode(), flat(fields)) for entry_id, fields in page]
        start = f"({found[-1][0]}"
    return found
