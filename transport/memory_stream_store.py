"""What the `MemoryStream`s and `MemoryDeadLetters` of one region share: their "server".

Invariant: every change is made under `changed`, and leaves the books as a Redis leaves them (lua/stream_prelude.lua): who
stores, settles or sets aside an entry counts it in the same act. Held by tests/contract/test_stream.py.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from anabranch.schemas.envelope import MAX_SEQ, is_producer
from anabranch.schemas.errors import BackpressureError
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.transport.stream import LOST_FATE
from anabranch.transport.stream_rules import parse_id

Id = tuple[int, int]


@dataclass(slots=True)
class Pending:
    consumer: str
    delivered_s: float
    deliveries: int


@dataclass(slots=True)
class ConsumerGroup:
    last: Id = (0, 0)
    pending: dict[Id, Pending] = field(default_factory=dict)
    asked_s: dict[str, float] = field(default_factory=dict)  # consumer -> when it last asked


@dataclass(slots=True)
class Letter:
    cause: str
    group: str
    entry_id: str
    fields: dict[bytes, bytes]


@dataclass(slots=True)
class Books:
    """All that a server would keep."""

    entries: dict[Id, dict[bytes, bytes]] = field(default_factory=dict)  # ascending, since ids ascend
    groups: dict[str, ConsumerGroup] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)  # producer -> highest sequence number
    seen_at: dict[str, float] = field(
        default_factory=dict
    )  # producer -> when it last appended something new, in seconds
    open: set[tuple[str, int]] = field(default_factory=set)  # stored and not settled by the learner's group
    open_ids: dict[Id, tuple[str, int]] = field(default_factory=dict)
    letters: dict[Id, Letter] = field(default_factory=dict)
    fates: dict[str, int] = field(default_factory=dict)
    produced: int = 0
    requeued: int = 0
    made_room: int = 0
    grouped: int = 0  # how often the learner's group was made
    again: int = 0  # delivered to it a second time because it was made anew
    added: int = 0  # entries, by whomever


class MemoryStreamStore:
    """The "server" of one region. `clock` gives seconds, for idle times. While `max_bytes` (0: no limit) are used it takes
    no more entries, as a server at its limit."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, max_bytes: int = 0) -> None:
        self.clock, self.max_bytes = clock, max_bytes
        self.changed = threading.Condition(threading.RLock())
        self.books = Books()
        self._next = 1  # of ids, which a server takes from its clock: they do not come again after `restore`

    @property
    def entries(self) -> dict[Id, dict[bytes, bytes]]:
        return self.books.entries

    @property
    def dead_letters(self) -> list[dict[bytes, bytes]]:
        """With `cause`, `by` and `id`, as a Redis keeps them."""
        return [
            {b"cause": x.cause.encode(), b"by": x.group.encode(), b"id": x.entry_id.encode(), **x.fields}
            for x in self.books.letters.values()
        ]

    def save(self) -> Books:
        """A copy of what it holds now, for `restore`: a server that comes back without its last second."""
        with self.changed:
            return copy.deepcopy(self.books)

    def restore(self, books: Books) -> None:
        with self.changed:
            self.books = copy.deepcopy(books)
            self.changed.notify_all()

    def bytes_used(self) -> int:
        with self.changed:
            return sum(len(name) + len(value) for row in self.books.entries.values() for name, value in row.items())

    def refuse_when_full(self) -> None:
        """Raises BackpressureError."""
        if self.max_bytes and self.bytes_used() >= self.max_bytes:
            raise BackpressureError(
                f"the stream in memory takes no more than {self.max_bytes} bytes; nothing was lost: consumers must catch up"
            )

    def new_id(self) -> Id:
        self._next += 1
        return 1, self._next - 1

    def add(self, fields: Mapping[bytes, bytes]) -> str:
        """Store an entry as it is, as somebody else would (for tests: also a malformed one); returns its id."""
        with self.changed:
            entry = self.new_id()
            self.books.entries[entry] = dict(fields)
            self.books.added += 1
            self.changed.notify_all()
            return text_of(entry)

    def note_open(self, entry_id: str, producer: str, seq: int) -> None:
        """An entry is stored that the learner's group has to settle."""
        if (producer, seq) not in self.books.open:
            self.books.open.add((producer, seq))
            self.books.open_ids[parse_id(entry_id)] = producer, seq

    def note_again(self, entry_id: str, fields: Mapping[bytes, bytes]) -> None:
        """`note_open` of an entry whose fields anybody may have written."""
        producer, seq = (fields.get(name, b"").decode("ascii", "replace") for name in (b"producer", b"seq"))
        if is_producer(producer) and seq.isascii() and seq.isdigit() and int(seq) <= MAX_SEQ:
            self.note_open(entry_id, producer, int(seq))

    def group(self, name: str) -> ConsumerGroup:
        """The consumer group, made from the beginning of the stream if it is missing."""
        books = self.books
        if name not in books.groups:
            books.groups[name] = ConsumerGroup()
            books.grouped += name == LEARNER_GROUP
            if name == LEARNER_GROUP and books.grouped > 1:
                # Somebody destroyed it: what it had settled and is still there comes, and will be counted, again.
                self.settle_lost()
                owed = books.produced + self.foreign() - sum(books.fates.values())
                books.again += max(0, len(books.entries) - owed)
        return books.groups[name]

    def acknowledge(self, group: str, entry_id: str, fate: str) -> bool:
        """Whether it was pending; its fate ("": of another group than the learner's) is counted then."""
        entry, books = parse_id(entry_id), self.books
        if group not in books.groups or books.groups[group].pending.pop(entry, None) is None:
            return False
        if fate:
            self.count_fate(entry, fate)
        return True

    def count_fate(self, entry: Id, fate: str) -> None:
        """The learner's group is done with an entry."""
        self.books.open.discard(self.books.open_ids.pop(entry, ("", -1)))
        self.books.fates[fate] = self.books.fates.get(fate, 0) + 1

    def settle_lost(self) -> None:
        """Settle for the learner's group what it can never be given though it is open: entries that somebody deleted
        before they were delivered."""
        books = self.books
        pending = books.groups[LEARNER_GROUP].pending
        for entry in [entry for entry in books.open_ids if entry not in books.entries and entry not in pending]:
            self.count_fate(entry, LOST_FATE)

    def foreign(self) -> int:
        books = self.books
        return max(0, books.added - books.produced - books.requeued) + books.again


def text_of(entry: Id) -> str:
    return f"{entry[0]}-{entry[1]}"
