"""What dead letters promise (transport/dead_letters.py), for every implementation."""

from __future__ import annotations

import pytest

from anabranch.schemas.envelope import Envelope, open_envelope
from anabranch.schemas.errors import BackpressureError, UsageError
from anabranch.transport.dead_letters import LISTED_BYTES
from anabranch.transport.stream import ProducerProgress
from tests.streams import put

GROUP = "learner"


def entry(seq: int, payload: bytes = b"arrow") -> Envelope:
    return Envelope("p", seq, seq, payload)


def read(stream, group: str = GROUP):
    return stream.read(group, "c", max_entries=100, block_ms=0)


def bury(backend, *envelopes: Envelope, group: str = GROUP, **more: int) -> None:
    stream = backend.stream(**more)
    put(stream, *envelopes)
    for delivery in read(stream, group):
        stream.dead_letter(group, delivery, "checksum mismatch")


def test_a_letter_names_what_it_was_and_why_it_is_here(backend):
    letters = backend.letters()
    assert (letters.list(), letters.count(), letters.made_room()) == ([], 0, 0)
    bury(backend, entry(4, payload=b"evil"))
    (letter,) = letters.list()
    assert letters.get(letter.letter_id) == letter
    assert (letter.cause, letter.group, letter.fields[b"payload"]) == ("checksum mismatch", GROUP, b"evil")
    assert letter.bytes == sum(len(name) + len(value) for name, value in letter.fields.items())
    assert letters.count() == 1
    assert backend.stream().ledger(GROUP).fates == {"dropped:dead_letter": 1}


def test_a_list_is_in_order_and_goes_on_from_where_it_ended(backend):
    bury(backend, *map(entry, range(5)))
    letters = backend.letters()
    first = letters.list(max_letters=2)
    rest = letters.list(after_id=first[-1].letter_id)
    assert [int(letter.fields[b"seq"]) for letter in first + rest] == [0, 1, 2, 3, 4]
    assert letters.list(after_id=rest[-1].letter_id) == []
    assert letters.list(max_letters=0) == []


def test_a_long_list_comes_whole(backend):
    bury(backend, *map(entry, range(100)))
    bury(backend, *map(entry, range(100, 130)))
    assert [int(x.fields[b"seq"]) for x in backend.letters().list(max_letters=120)] == list(range(120))


def test_a_list_shows_the_beginning_of_what_is_large(backend):
    bury(backend, entry(0, payload=bytes(5000)))
    letters = backend.letters()
    (letter,) = letters.list()
    whole = letters.get(letter.letter_id)
    assert whole.fields[b"payload"] == bytes(5000)
    assert letter.fields[b"payload"] == bytes(LISTED_BYTES)
    assert letter.bytes == whole.bytes > 5000


def test_an_entry_is_put_back_as_it_was_and_once(backend):
    bury(backend, entry(7))
    letters, stream = backend.letters(), backend.stream()
    (letter,) = letters.list()
    assert stream.progress("p") == ProducerProgress(8, None)
    entry_id = letters.requeue(letter.letter_id)
    assert letters.requeue(letter.letter_id) is None
    assert (letters.count(), letters.get(letter.letter_id)) == (0, None)
    counts = stream.ledger(GROUP)
    assert (counts.produced, counts.foreign, counts.pending, counts.fates, counts.balanced) == (1, 0, 1, {}, True)
    assert stream.progress("p") == ProducerProgress(8, 7), "open again"
    (delivery,) = read(stream)
    assert (delivery.entry_id, open_envelope(delivery.fields, max_entry_bytes=100)) == (entry_id, entry(7))
    stream.settle(GROUP, [(delivery.entry_id, "trained")])
    assert stream.ledger(GROUP).fates == {"trained": 1}
    assert stream.progress("p").lowest_open is None


def test_it_may_be_set_aside_and_put_back_again_and_again(backend):
    stream, letters = backend.stream(), backend.letters()
    bury(backend, entry(0))
    for _ in range(3):
        letters.requeue(letters.list()[0].letter_id)
        stream.dead_letter(GROUP, read(stream)[0], "checksum mismatch")
        counts = stream.ledger(GROUP)
        assert (counts.fates, counts.balanced) == ({"dropped:dead_letter": 1}, True)
    stream.trim()
    assert backend.size()["entries"] == backend.size()["open"] == backend.size()["open ids"] == 0


def test_what_is_dropped_stays_counted_as_dropped(backend):
    bury(backend, entry(0), entry(1))
    letters = backend.letters()
    first, second = letters.list()
    assert letters.drop(first.letter_id)
    assert not letters.drop(first.letter_id)
    assert letters.requeue(first.letter_id) is None
    assert [x.letter_id for x in letters.list()] == [second.letter_id]
    counts = backend.stream().ledger(GROUP)
    assert (counts.fates, counts.balanced) == ({"dropped:dead_letter": 2}, True)


def test_a_foreign_entry_goes_through_the_same_books(backend):
    stream, letters = backend.stream(), backend.letters()
    backend.put_raw({b"cause": b"mine", b"by": b"me", b"seq": b"x", b"producer": b"a b"})
    stream.dead_letter(GROUP, read(stream)[0], "no payload")
    (letter,) = letters.list()
    assert (letter.cause, letter.group, letter.fields[b"cause"]) == ("no payload", GROUP, b"mine")
    letters.requeue(letter.letter_id)
    counts = stream.ledger(GROUP)
    assert (counts.produced, counts.foreign, counts.pending, counts.balanced) == (0, 1, 1, True)
    assert read(stream)[0].fields == {b"cause": b"mine", b"by": b"me", b"seq": b"x", b"producer": b"a b"}
    assert backend.size()["open"] == 0, "nobody can say whose it is"


def test_a_double_that_is_put_back_leaves_the_original_open(backend):
    stream, letters = backend.stream(), backend.letters()
    put(stream, entry(0))
    backend.put_raw({name.encode(): value for name, value in entry(0).seal().items()})
    ours, double = read(stream)
    stream.dead_letter(GROUP, double, "unreadable")
    letters.requeue(letters.list()[0].letter_id)
    (double,) = read(stream)
    assert backend.size()["open"] == backend.size()["open ids"] == 1
    stream.settle(GROUP, [(double.entry_id, "dropped:duplicate")])
    assert stream.progress("p") == ProducerProgress(1, 0)
    stream.settle(GROUP, [(ours.entry_id, "trained")])
    assert stream.progress("p") == ProducerProgress(1, None)
    assert stream.ledger(GROUP).balanced


def test_what_another_group_set_aside_comes_back_as_one_more_entry(backend):
    """The learner's group has dealt with it by itself: it may have trained it."""
    stream, letters = backend.stream(), backend.letters()
    bury(backend, entry(0), group="recorder")
    stream.settle(GROUP, [(read(stream)[0].entry_id, "trained")])
    assert stream.ledger(GROUP).fates == {"trained": 1}
    letters.requeue(letters.list()[0].letter_id)
    counts = stream.ledger(GROUP)
    assert (counts.produced, counts.foreign, counts.pending, counts.balanced) == (1, 1, 1, True)
    assert stream.progress("p").lowest_open is None
    stream.settle(GROUP, [(read(stream)[0].entry_id, "dropped:duplicate")])
    assert stream.ledger(GROUP).balanced


def test_the_oldest_make_room_and_are_counted(backend):
    bury(backend, *map(entry, range(5)), max_dead_letters=3)
    letters = backend.letters()
    assert [int(x.fields[b"seq"]) for x in letters.list()] == [2, 3, 4]
    assert (letters.count(), letters.made_room()) == (3, 2)
    counts = backend.stream().ledger(GROUP)
    assert (counts.fates, counts.balanced) == ({"dropped:dead_letter": 5}, True)
    letters.requeue(letters.list()[0].letter_id)
    counts = backend.stream().ledger(GROUP)
    assert (counts.fates, counts.balanced) == ({"dropped:dead_letter": 4}, True)


def test_a_letter_of_which_nothing_is_left_can_only_be_dropped(backend):
    stream, letters = backend.stream(), backend.letters()
    put(stream, entry(0))
    (delivery,) = read(stream)
    backend.delete_entry(delivery.entry_id)
    stream.dead_letter(GROUP, delivery, "checksum mismatch")
    (letter,) = letters.list()
    assert (letter.fields, letter.bytes, letter.entry_id) == ({}, 0, delivery.entry_id)
    with pytest.raises(UsageError, match=r"holds no entry.*drop it"):
        letters.requeue(letter.letter_id)
    assert letters.drop(letter.letter_id)
    assert stream.ledger(GROUP).balanced


@pytest.mark.parametrize("name", ["", "x", "1", "-", "+", "1-", "1-2-3", "1-x", "$", "9" * 30 + "-0"])
def test_an_id_that_is_none_is_a_mistake_of_the_caller(backend, name):
    letters = backend.letters()
    for call in (letters.get, letters.requeue, letters.drop, lambda name: letters.list(after_id=name)):
        with pytest.raises(UsageError, match="not the id of an entry"):
            call(name)


def test_a_full_server_keeps_the_letter(backend):
    bury(backend, entry(0))
    letters = backend.letters()
    (letter,) = letters.list()
    put(backend.stream(), entry(1))
    backend.set_full(True)
    with pytest.raises(BackpressureError, match="takes no more"):
        letters.requeue(letter.letter_id)
    assert letters.list() == [letter]
    counts = backend.stream().ledger(GROUP)
    assert (counts.fates, counts.pending, counts.balanced) == ({"dropped:dead_letter": 1}, 1, True)
    backend.set_full(False)
    assert letters.requeue(letter.letter_id)
    assert backend.stream().ledger(GROUP).pending == 2
