"""What a producer may rely on: its entries are stored once and in order, and it is told which of them are settled, and
which of them the server has forgotten."""

from __future__ import annotations

import threading
import time

import pytest

from anabranch.schemas.envelope import Envelope, open_envelope
from anabranch.schemas.errors import EnvelopeError
from anabranch.transport.stream import ProducerProgress
from tests.streams import put

GROUP = "learner"


def entries(*seqs: int, producer: str = "p", payload: bytes = b"arrow") -> list[Envelope]:
    return [Envelope(producer, seq, group_index=seq, payload=payload) for seq in seqs]


def read(stream, group: str = GROUP, consumer: str = "c"):
    return stream.read(group, consumer, max_entries=1000, block_ms=0)


def seqs(deliveries) -> list[int]:
    return [open_envelope(d.fields, max_entry_bytes=10**6).seq for d in deliveries]


def ids(deliveries) -> dict[int, str]:
    return dict(zip(seqs(deliveries), (d.entry_id for d in deliveries), strict=True))


def test_many_are_stored_in_order_and_a_repetition_adds_nothing(backend):
    stream = backend.stream()
    assert stream.append(entries(1, 2, 3, 4), floor=1) == 5
    assert stream.append(entries(3, 4, 5), floor=2) == 6
    assert stream.append(entries(1, 2), floor=1) == 3, "one past the last given: all of these are stored"
    assert seqs(read(stream)) == [1, 2, 3, 4, 5]
    assert stream.ledger(GROUP).produced == 5


def test_nothing_is_appended_of_nothing(backend):
    assert backend.stream().append([], floor=4) == 4
    assert backend.size()["entries"] == 0


def test_a_gap_is_not_stored_and_the_missing_one_is_named(backend):
    stream = backend.stream()
    assert stream.append(entries(3, 4), floor=2) == 2, "nothing is known of the producer: it begins at its floor"
    assert stream.append(entries(2), floor=2) == 3
    assert stream.append(entries(5, 6), floor=2) == 3
    assert seqs(read(stream)) == [2]
    assert stream.append(entries(3, 4, 5, 6), floor=2) == 7
    assert seqs(read(stream)) == [3, 4, 5, 6]


def test_a_reader_that_waits_does_not_notice_what_is_refused(backend):
    """The stream's key is out of the way while an entry is kept out: nobody may see that."""
    stream, reader, other = backend.stream(), backend.stream(), backend.stream()
    stream.append(entries(0), floor=0)
    got = read(reader) + read(other, "recorder")
    waits = [
        threading.Thread(target=lambda r=r, g=g: got.extend(r.read(g, "c", max_entries=9, block_ms=3000)))
        for r, g in ((reader, GROUP), (other, "recorder"))
    ]
    for wait in waits:
        wait.start()
    time.sleep(0.1)
    for _ in range(20):
        assert stream.append(entries(5, 6), floor=0) == 1
    assert all(wait.is_alive() for wait in waits)
    stream.append(entries(1), floor=0)
    for wait in waits:
        wait.join(5)
    assert sorted(seqs(got)) == [0, 0, 1, 1]
    assert stream.state().entries == 2
    assert {lag.name for lag in stream.state().groups} == {GROUP, "recorder"}


def test_producers_that_append_at_once_all_get_through(backend):
    made, expected = [backend.stream() for _ in range(4)], {}

    def produce(number: int) -> None:
        at = 0
        while at < 40:
            assert made[number].append(entries(at + 1, producer=f"p{number}"), floor=0) == at, "it is not its turn"
            at = made[number].append(entries(at, at + 1, producer=f"p{number}"), floor=0)
        expected[number] = at

    threads = [threading.Thread(target=produce, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert expected == dict.fromkeys(range(4), 40)
    found = [open_envelope(d.fields, max_entry_bytes=100) for d in read(made[0])]
    for number in range(4):
        assert [e.seq for e in found if e.producer == f"p{number}"] == list(range(40))
    counts = made[0].ledger(GROUP)
    assert (counts.produced, counts.pending, counts.foreign) == (160, 160, 0)


def test_a_stream_goes_on_at_the_floor_when_what_it_misses_is_held_by_nobody(backend):
    """The producer released 1 to 9 once they were settled; a server that lost its memory must not ask for them."""
    stream = backend.stream()
    assert stream.append(entries(1, 2), floor=1) == 3
    assert stream.append(entries(10, 11), floor=10) == 12
    assert seqs(read(stream)) == [1, 2, 10, 11]


def test_producers_are_apart(backend):
    stream = backend.stream()
    for producer in ("p", "p1", "p-1", "q", "P"):
        assert stream.append(entries(7, producer=producer), floor=7) == 8
    stream.settle(GROUP, [(ids(read(stream)[1:2])[7], "trained")])
    assert stream.progress("p") == ProducerProgress(8, 7)
    assert stream.progress("p1") == ProducerProgress(8, None)
    assert stream.progress("nobody") == ProducerProgress(None, None)
    assert stream.progress("nobody").settled_below == 0


def test_what_is_settled_out_of_order_is_open_from_the_lowest(backend):
    stream = backend.stream()
    stream.append(entries(*range(5, 16)), floor=5)
    at = ids(read(stream))
    for settled, lowest in ((7, 5), (5, 6), (6, 8), (15, 8), (8, 9)):
        stream.settle(GROUP, [(at[settled], "trained")])
        assert stream.progress("p") == ProducerProgress(16, lowest)
        assert stream.progress("p").settled_below == lowest
    stream.settle(GROUP, [(at[seq], "dropped:age") for seq in range(9, 15)])
    assert stream.progress("p") == ProducerProgress(16, None)
    assert stream.progress("p").settled_below == 16
    assert backend.size()["open"] == backend.size()["open ids"] == 0


def test_only_the_learners_group_closes_an_entry(backend):
    stream = backend.stream()
    stream.append(entries(0, 1, 2), floor=0)
    recorded = read(stream, "recorder")
    stream.settle("recorder", [(recorded[0].entry_id, "trained")])
    stream.dead_letter("recorder", recorded[1], "unreadable")
    backend.delete_entry(recorded[2].entry_id)
    assert stream.read_own_pending("recorder", "c", max_entries=9) == []
    assert stream.progress("p").lowest_open == 0
    assert stream.ledger(GROUP).fates == {}


@pytest.mark.parametrize("ending", ["settle", "dead letter", "lost, own", "lost, claimed"])
def test_every_end_of_an_entry_closes_it(backend, ending):
    stream = backend.stream()
    stream.append(entries(0, 1), floor=0)
    first, second = read(stream)
    if ending == "settle":
        stream.settle(GROUP, [(first.entry_id, "trained")])
    elif ending == "dead letter":
        stream.dead_letter(GROUP, first, "unreadable")
    else:
        backend.delete_entry(first.entry_id)
        if ending == "lost, own":
            stream.read_own_pending(GROUP, "c", max_entries=9)
        else:
            stream.claim_idle(GROUP, "other", idle_ms=0, max_entries=9)
    assert stream.progress("p") == ProducerProgress(2, 1)
    stream.settle(GROUP, [(second.entry_id, "trained")])
    assert backend.size()["open"] == backend.size()["open ids"] == 0
    assert stream.ledger(GROUP).balanced


def test_a_producer_is_told_what_a_server_forgot_and_gives_it_again(backend):
    stream = backend.stream()
    stream.append(entries(1, 2, 3), floor=1)
    at = ids(read(stream))
    stream.settle(GROUP, [(at[1], "trained")])
    bring_back = backend.save()
    stream.append(entries(4, 5, 6), floor=1)
    stream.settle(GROUP, [(at[2], "trained"), (ids(read(stream))[4], "trained")])
    assert stream.progress("p") == ProducerProgress(7, 3)

    bring_back()
    stream = backend.stream()
    assert stream.progress("p") == ProducerProgress(4, 2)
    assert stream.append(entries(7), floor=2) == 4, "7 would leave a gap"
    assert stream.append(entries(4, 5, 6, 7), floor=2) == 8
    assert seqs(stream.read_own_pending(GROUP, "c", max_entries=9)) == [2, 3]
    assert seqs(read(stream)) == [4, 5, 6, 7]
    assert stream.ledger(GROUP).balanced


def test_a_server_that_forgot_everything_begins_at_the_floor(backend):
    bring_back = backend.save()
    stream = backend.stream()
    stream.append(entries(*range(1, 9)), floor=1)
    bring_back()
    assert stream.progress("p") == ProducerProgress(None, None)
    assert stream.append(entries(9), floor=6) == 6
    assert stream.append(entries(6, 7, 8, 9), floor=6) == 10
    assert seqs(read(stream)) == [6, 7, 8, 9]
    counts = stream.ledger(GROUP)
    assert (counts.produced, counts.foreign, counts.balanced) == (4, 0, True)


def test_a_producer_is_forgotten_only_when_nothing_of_it_is_open(backend):
    stream = backend.stream()
    stream.append(entries(0, 1), floor=0)
    stream.append(entries(0, producer="q"), floor=0)
    got = read(stream)
    stream.settle(GROUP, [(got[0].entry_id, "trained")])
    assert not stream.forget_producer("p")
    assert stream.progress("p") == ProducerProgress(2, 1)
    stream.settle(GROUP, [(got[1].entry_id, "trained")])
    assert stream.forget_producer("p")
    assert stream.forget_producer("p")
    assert stream.forget_producer("nobody")
    assert stream.progress("p") == ProducerProgress(None, None)
    assert stream.progress("q") == ProducerProgress(1, 0)
    assert backend.size()["seen"] == 1
    assert stream.ledger(GROUP).balanced


def test_an_entry_that_somebody_else_added_is_counted_as_foreign(backend):
    stream = backend.stream()
    stream.append(entries(0), floor=0)
    backend.put_raw({b"nonsense": b"1"})
    backend.put_raw({name.encode(): value for name, value in entries(0)[0].seal().items()})
    counts = stream.ledger(GROUP)
    assert (counts.produced, counts.foreign, counts.pending, counts.balanced) == (1, 2, 3, True)
    ours, nonsense, double = read(stream)
    stream.dead_letter(GROUP, nonsense, "no payload")
    stream.settle(GROUP, [(ours.entry_id, "trained"), (double.entry_id, "dropped:duplicate")])
    stream.trim()
    counts = stream.ledger(GROUP)
    assert (counts.produced, counts.foreign, counts.pending, counts.balanced) == (1, 2, 0, True)
    assert stream.progress("p") == ProducerProgress(1, None)


def test_a_double_that_is_settled_first_does_not_close_the_original(backend):
    stream = backend.stream()
    stream.append(entries(0), floor=0)
    backend.put_raw({name.encode(): value for name, value in entries(0)[0].seal().items()})
    ours, double = read(stream)
    stream.settle(GROUP, [(double.entry_id, "trained")])
    assert stream.progress("p").lowest_open == 0
    stream.settle(GROUP, [(ours.entry_id, "dropped:duplicate")])
    assert stream.progress("p").lowest_open is None


BAD = {
    "too large": (
        entries(0) + entries(1, payload=b"x" * 1001),
        0,
        "p/1 holds 1001 bytes; stream.max_entry_bytes is 1000",
    ),
    "a gap": (entries(0, 2), 0, "p/2 follows p/0"),
    "descending": (entries(1, 0), 0, "p/0 follows p/1"),
    "two producers": (entries(0) + entries(1, producer="q"), 0, "q/1 follows p/0"),
    "below the floor": (entries(3), 4, "p/3 is below 4"),
    "a negative number": (entries(-1), 0, "0 to 9"),
    "a number beyond a double": (entries(10**15), 0, "0 to 9"),
    "a producer with a space": (entries(0, producer="p 0"), 0, "visible ASCII"),
    "a producer without a name": (entries(0, producer=""), 0, "visible ASCII"),
    "a producer of two lines": (entries(0, producer="p\n"), 0, "visible ASCII"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_appended_is_refused_before_anything_is_stored(backend, kind):
    given, floor, message = BAD[kind]
    with pytest.raises(EnvelopeError, match=message):
        backend.stream(max_entry_bytes=1000).append(given, floor=floor)
    assert backend.size()["entries"] == 0


def test_a_payload_may_be_a_view_into_a_buffer(backend):
    buffer = bytearray(b"..payload..")
    stream = backend.stream()
    stream.append([Envelope("p", 0, 0, memoryview(buffer)[2:-2])], floor=0)
    buffer[:] = b"-" * len(buffer)
    (got,) = read(stream)
    assert open_envelope(got.fields, max_entry_bytes=100).payload == b"payload"


def test_the_books_stay_flat_over_thousands_of_entries(backend):
    stream = backend.stream()
    sizes = []
    for first in range(0, 2000, 100):
        stream.append(entries(*range(first, first + 100)), floor=first)
        stream.settle(GROUP, [(d.entry_id, "trained") for d in read(stream)])
        assert stream.trim() == 100
        sizes.append(backend.size())
    assert sizes[0] == sizes[-1]
    assert {name: n for name, n in sizes[-1].items() if name != "keys"} == {
        "entries": 0,
        "open": 0,
        "open ids": 0,
        "seen": 1,
    }
    assert stream.ledger(GROUP).fates == {"trained": 2000}
    assert put(stream, *entries(2000)) == 1


def test_a_stream_knows_since_when_a_producer_has_appended_nothing(backend):
    stream = backend.stream()
    assert stream.progress("p").idle_ms is None
    stream.append(entries(0, 1), floor=0)
    idle_ms = stream.progress("p").idle_ms
    assert idle_ms is not None
    assert 0 <= idle_ms < 60_000
    time.sleep(0.01)
    later_ms = stream.progress("p").idle_ms
    assert later_ms > idle_ms
    stream.append(entries(0, 1), floor=0)  # nothing new
    assert stream.progress("p").idle_ms >= later_ms
    stream.settle(GROUP, [(delivery.entry_id, "trained") for delivery in read(stream)])
    assert stream.forget_producer("p")
    assert stream.progress("p").idle_ms is None
