"""A stream beside a model of it: after any interleaving of what producers, readers, operators and strangers do, and of a
server that comes back without its last second, the books are those of the model."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.schemas.envelope import Envelope
from anabranch.transport.stream import Delivery, ProducerProgress
from tests.contract.backends import Backend

GROUP = "learner"
PRODUCERS = ("p0", "p1", "p10")
WHICH = st.integers(0, 30)
Owner = tuple[str, int] | None  # the (producer, seq) that an entry is open for


@dataclass
class Model:
    next_seq: dict[str, int] = field(default_factory=dict)
    unread: list[Owner] = field(default_factory=list)  # by the learner's group, in order
    held: dict[str, tuple[Delivery, Owner]] = field(default_factory=dict)  # read by it and not settled
    ended: set[str] = field(default_factory=set)
    fates: Counter[str] = field(default_factory=Counter)
    produced: int = 0
    foreign: int = 0

    def end(self, entry_id: str, fate: str) -> None:
        del self.held[entry_id]
        self.ended.add(entry_id)
        self.fates[fate] += 1

    def open(self) -> set[Owner]:
        return {owner for owner in [*self.unread, *(owner for _, owner in self.held.values())] if owner}


class Play:
    """Each act on the stream and on the model."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.stream, self.letters = backend, backend.stream(), backend.letters()
        self.model = Model()
        self.saved = (backend.save(), copy.deepcopy(self.model))

    def append(self, number: int, ahead: int, count: int) -> None:
        producer, model = PRODUCERS[number], self.model
        expected = model.next_seq.get(producer, 1)
        first = max(1, expected + ahead)
        stored = range(expected, first + count) if first <= expected else range(0)
        got = self.stream.append([Envelope(producer, seq, seq, b"x") for seq in range(first, first + count)], floor=1)
        assert got == min(expected + len(stored), first + count)
        model.unread += [(producer, seq) for seq in stored]
        model.produced += len(stored)
        if stored:
            model.next_seq[producer] = stored.stop

    def foreign(self, double: bool) -> None:
        fields = Envelope("p0", 1, 1, b"x").seal() if double else {"nonsense": b"1"}
        self.backend.put_raw({name.encode(): value for name, value in fields.items()})
        self.model.unread.append(None)
        self.model.foreign += 1

    def read(self, consumer: str, count: int) -> None:
        fresh = self.stream.read(GROUP, consumer, max_entries=count, block_ms=0)
        owners, self.model.unread = self.model.unread[:count], self.model.unread[count:]
        assert not {d.entry_id for d in fresh} & (self.model.held.keys() | self.model.ended), (
            "a new one is delivered once"
        )
        self.model.held.update({d.entry_id: (d, owner) for d, owner in zip(fresh, owners, strict=True)})

    def one_of(self, which: int) -> str | None:
        return list(self.model.held)[which % len(self.model.held)] if self.model.held else None

    def settle(self, which: int, fate: str) -> None:
        if entry_id := self.one_of(which):
            assert self.stream.settle(GROUP, [(entry_id, fate), (entry_id, "trained")]) == 1
            self.model.end(entry_id, fate)

    def bury(self, which: int) -> None:
        if entry_id := self.one_of(which):
            for cause in ("first", "second"):
                self.stream.dead_letter(GROUP, self.model.held[entry_id][0], cause)
            self.model.end(entry_id, "dropped:dead_letter")

    def claim(self, consumer: str, count: int) -> None:
        got = self.stream.claim_idle(GROUP, consumer, idle_ms=0, max_entries=count)
        assert {d.entry_id for d in got} <= self.model.held.keys()

    def lose(self, which: int) -> None:
        """Somebody deletes a delivered entry: it ends when its consumer asks again."""
        if entry_id := self.one_of(which):
            self.backend.delete_entry(entry_id)
            left = [
                d.entry_id
                for consumer in ("c1", "c2")
                for d in self.stream.read_own_pending(GROUP, consumer, max_entries=1000)
            ]
            self.model.end(entry_id, "dropped:lost")
            assert sorted(left) == sorted(self.model.held)

    def requeue(self, which: int) -> None:
        letters = self.letters.list()
        if not letters:
            return
        letter = letters[which % len(letters)]
        assert self.letters.requeue(letter.letter_id)
        assert self.letters.requeue(letter.letter_id) is None
        owner = None
        if letter.group == GROUP:
            self.model.fates["dropped:dead_letter"] -= 1
            if b"seq" in letter.fields:
                owner = letter.fields[b"producer"].decode(), int(letter.fields[b"seq"])
        else:
            self.model.foreign += 1
        self.model.unread.append(None if owner in self.model.open() else owner)

    def drop(self, which: int) -> None:
        letters = self.letters.list()
        if letters:
            assert self.letters.drop(letters[which % len(letters)].letter_id)

    def record(self, count: int, readable: bool) -> None:
        for delivery in self.stream.read("recorder", "c", max_entries=count, block_ms=0):
            if readable:
                self.stream.settle("recorder", [(delivery.entry_id, "trained")])
            else:
                self.stream.dead_letter("recorder", delivery, "unreadable")

    def forget(self, number: int) -> None:
        producer = PRODUCERS[number]
        is_open = any(name == producer for name, _ in self.model.open())
        assert self.stream.forget_producer(producer) == (not is_open)
        if not is_open:
            self.model.next_seq.pop(producer, None)

    def trim(self) -> None:
        self.stream.trim()

    def save(self) -> None:
        self.saved = self.backend.save(), copy.deepcopy(self.model)

    def restore(self) -> None:
        bring_back, model = self.saved
        bring_back()
        self.model = copy.deepcopy(model)

    def check(self) -> None:
        model, counts = self.model, self.stream.ledger(GROUP)
        assert (counts.produced, counts.foreign) == (model.produced, model.foreign)
        assert counts.pending == len(model.unread) + len(model.held)
        assert counts.fates == {name: n for name, n in model.fates.items() if n}
        assert counts.balanced
        assert self.backend.size()["open"] == self.backend.size()["open ids"] == len(model.open())
        for producer in PRODUCERS:
            lowest = min((seq for name, seq in model.open() if name == producer), default=None)
            assert self.stream.progress(producer) == ProducerProgress(model.next_seq.get(producer), lowest)


CONSUMER = st.sampled_from(["c1", "c2"])
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 2), st.sampled_from([0, 0, 0, -1, -2, 1]), st.integers(1, 4)),
        st.tuples(st.just("foreign"), st.booleans()),
        st.tuples(st.just("read"), CONSUMER, st.integers(1, 4)),
        st.tuples(st.just("settle"), WHICH, st.sampled_from(["trained", "dropped:age"])),
        st.tuples(st.just("bury"), WHICH),
        st.tuples(st.just("claim"), CONSUMER, st.integers(1, 3)),
        st.tuples(st.just("lose"), WHICH),
        st.tuples(st.just("requeue"), WHICH),
        st.tuples(st.just("drop"), WHICH),
        st.tuples(st.just("record"), st.integers(1, 4), st.booleans()),
        st.tuples(st.just("forget"), st.integers(0, 2)),
        st.tuples(st.sampled_from(["trim", "save", "restore"])),
    ),
    max_size=50,
)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(acts=ACTS)
def test_the_books_are_those_of_the_model(stream_maker, acts):
    play = Play(stream_maker())
    for name, *args in acts:
        getattr(play, name)(*args)
        play.check()
    play.read("c1", 1000)
    for entry_id in list(play.model.held):
        assert play.stream.settle(GROUP, [(entry_id, "trained")]) == 1, "nothing unsettled was trimmed or lost"
        play.model.end(entry_id, "trained")
    play.check()
    assert play.model.open() == set()
