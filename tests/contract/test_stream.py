"""What a trajectory stream promises (transport/stream.py), for every implementation."""

from __future__ import annotations

import threading
import time

import pytest

from anabranch.schemas.envelope import Envelope, open_envelope
from anabranch.schemas.errors import EnvelopeError
from anabranch.transport.stream import Delivery, TrajectoryStream
from tests.streams import put

GROUP = "learner"


def entry(seq: int, producer: str = "p", payload: bytes = b"arrow") -> Envelope:
    return Envelope(producer, seq, group_index=seq, payload=payload)


def read(stream: TrajectoryStream, consumer: str = "c", group: str = GROUP, n: int = 100) -> list[Delivery]:
    return stream.read(group, consumer, max_entries=n, block_ms=0)


def seqs(deliveries: list[Delivery]) -> list[int]:
    return [open_envelope(d.fields, max_entry_bytes=10**6).seq for d in deliveries]


def test_entries_arrive_in_order_and_unchanged(backend):
    stream = backend.stream()
    sent = [entry(i, payload=bytes(range(256)) * i) for i in range(5)]
    assert put(stream, *sent) == 5
    got = backend.stream().read(GROUP, "c", max_entries=10, block_ms=0)
    assert [open_envelope(d.fields, max_entry_bytes=10**6) for d in got] == sent
    assert all(d.deliveries == 1 for d in got)


def test_a_repeated_append_stores_once(backend):
    stream = backend.stream()
    assert stream.append([entry(0)], floor=0) == 1
    assert backend.stream().append([entry(0)], floor=0) == 1
    assert stream.append([entry(0, producer="q")], floor=0) == 1
    assert stream.append([entry(1)], floor=0) == 2
    assert stream.append([entry(0)], floor=0) == 1
    assert seqs(read(stream)) == [0, 0, 1]
    assert stream.ledger(GROUP).produced == 3


def test_an_entry_over_the_limit_is_refused_before_it_is_stored(backend):
    stream = backend.stream()
    with pytest.raises(EnvelopeError, match="max_entry_bytes"):
        put(stream, entry(0, payload=b"x" * (16 * 2**20 + 1)))
    assert stream.ledger(GROUP).produced == 0


def test_each_group_gets_every_entry_and_consumers_of_one_share_them(backend):
    stream = backend.stream()
    put(stream, *map(entry, range(6)))
    first, second = read(stream, "c1", n=2), read(stream, "c2", n=100)
    assert seqs(first) + seqs(second) == [0, 1, 2, 3, 4, 5]
    assert seqs(read(stream, group="recorder")) == [0, 1, 2, 3, 4, 5]


def test_reading_an_empty_stream_waits_and_returns_nothing(backend):
    start = time.monotonic()
    assert backend.stream().read(GROUP, "c", max_entries=1, block_ms=80) == []
    assert 0.06 < time.monotonic() - start < 20


def test_block_of_zero_does_not_wait(backend):
    start = time.monotonic()
    assert backend.stream().read(GROUP, "c", max_entries=1, block_ms=0) == []
    assert time.monotonic() - start < 20, "for Redis a block of 0 is one without end"


def test_a_waiting_reader_is_woken_by_an_append(backend):
    reader, writer = backend.stream(), backend.stream()
    read(reader)
    got: list[Delivery] = []
    thread = threading.Thread(target=lambda: got.extend(reader.read(GROUP, "c", max_entries=1, block_ms=3000)))
    start = time.monotonic()
    thread.start()
    time.sleep(0.05)
    put(writer, entry(7))
    thread.join(10)
    assert seqs(got) == [7]
    assert time.monotonic() - start < 2.9, "before its time was over"


def test_a_restarted_consumer_finds_what_it_had_not_settled(backend):
    stream = backend.stream()
    put(stream, *map(entry, range(4)))
    first = read(stream)
    stream.settle(GROUP, [(first[1].entry_id, "trained")])

    again = backend.stream()
    assert read(again) == []
    pending = again.read_own_pending(GROUP, "c", max_entries=10)
    assert seqs(pending) == [0, 2, 3]
    assert [d.deliveries for d in pending] == [2, 2, 2]
    assert again.read_own_pending(GROUP, "somebody else", max_entries=10) == []
    page = again.read_own_pending(GROUP, "c", max_entries=1, after_id=pending[0].entry_id)
    assert seqs(page) == [2]


def test_idle_entries_of_another_consumer_are_claimed_but_never_ones_own(backend):
    stream = backend.stream()
    put(stream, *map(entry, range(3)))
    read(stream, "dead", n=2)
    read(stream, "alive")
    assert stream.claim_idle(GROUP, "alive", idle_ms=60_000, max_entries=10) == []
    time.sleep(0.03)
    claimed = stream.claim_idle(GROUP, "alive", idle_ms=20, max_entries=1)
    assert seqs(claimed) == [0]
    assert claimed[0].deliveries == 2
    assert seqs(stream.claim_idle(GROUP, "alive", idle_ms=20, max_entries=10)) == [1]
    time.sleep(0.03)
    assert stream.claim_idle(GROUP, "alive", idle_ms=20, max_entries=10) == []
    assert seqs(stream.read_own_pending(GROUP, "alive", max_entries=10)) == [0, 1, 2]


def test_a_fate_is_counted_once(backend):
    stream = backend.stream()
    put(stream, *map(entry, range(3)))
    ids = [d.entry_id for d in read(stream)]
    assert stream.settle(GROUP, [(ids[0], "trained"), (ids[1], "dropped:age")]) == 2
    assert stream.settle(GROUP, [(ids[0], "trained"), (ids[1], "trained"), (ids[2], "trained")]) == 1
    assert stream.settle(GROUP, []) == 0
    counts = stream.ledger(GROUP)
    assert counts.fates == {"trained": 2, "dropped:age": 1}
    assert (counts.produced, counts.pending, counts.balanced) == (3, 0, True)


def test_other_groups_settle_without_counting(backend):
    stream = backend.stream()
    put(stream, entry(0), entry(1))
    one, two = read(stream, group="recorder")
    stream.settle("recorder", [(one.entry_id, "")])
    stream.dead_letter("recorder", two, "unreadable")
    assert stream.ledger("recorder").pending == 0
    counts = stream.ledger(GROUP)
    assert (counts.produced, counts.pending, counts.fates) == (2, 2, {})


def test_a_dead_letter_keeps_the_entry_and_its_cause(backend):
    stream = backend.stream()
    put(stream, entry(0, payload=b"evil"))
    (delivery,) = read(stream)
    stream.dead_letter(GROUP, delivery, "checksum mismatch")
    stream.dead_letter(GROUP, delivery, "again")
    (letter,) = backend.dead_letters()
    assert letter[b"cause"] == b"checksum mismatch"
    assert letter[b"by"] == b"learner"
    assert letter[b"payload"] == b"evil"
    counts = stream.ledger(GROUP)
    assert counts.fates == {"dropped:dead_letter": 1}
    assert counts.balanced
    assert stream.read_own_pending(GROUP, "c", max_entries=10) == []


def test_trim_removes_only_what_every_group_has_acknowledged(backend):
    stream = backend.stream()
    put(stream, *map(entry, range(5)))
    read(stream, group="recorder", n=3)
    assert stream.trim() == 0, "the learner has not read yet"
    mine = read(stream)
    stream.settle(GROUP, [(d.entry_id, "trained") for d in mine])
    assert stream.trim() == 0, "the recorder holds the first three"
    recorded = stream.read_own_pending("recorder", "c", max_entries=10)
    stream.settle("recorder", [(d.entry_id, "") for d in (recorded[0], recorded[2])])
    assert stream.trim() == 1, "the second is still pending"
    stream.settle("recorder", [(recorded[1].entry_id, "")])
    assert stream.trim() == 2, "the recorder has not read the last two"
    assert seqs(read(stream, group="recorder")) == [3, 4]
    assert stream.ledger(GROUP).balanced
    assert seqs(read(stream, group="latecomer")) == [3, 4]


def test_trim_of_a_fully_settled_stream_empties_it_and_the_ledger_still_balances(backend):
    stream = backend.stream()
    assert stream.trim() == 0
    put(stream, *map(entry, range(4)))
    stream.settle(GROUP, [(d.entry_id, "trained") for d in read(stream)])
    assert stream.trim() == 4
    put(stream, entry(4))
    counts = stream.ledger(GROUP)
    assert (counts.produced, counts.pending, counts.balanced) == (5, 1, True)
    assert seqs(read(stream)) == [4]


def test_the_ledger_of_a_group_that_never_read_counts_everything_as_pending(backend):
    stream = backend.stream()
    assert stream.ledger(GROUP).balanced
    put(stream, *map(entry, range(3)))
    counts = stream.ledger(GROUP)
    assert (counts.produced, counts.pending) == (3, 3)


def test_a_malformed_entry_is_delivered_and_can_be_buried(backend):
    backend.put_raw({b"nonsense": b"1"})
    stream = backend.stream()
    (delivery,) = read(stream)
    assert delivery.fields == {b"nonsense": b"1"}
    stream.dead_letter(GROUP, delivery, "no payload")
    assert backend.dead_letters()[0][b"nonsense"] == b"1"


def test_an_entry_of_very_many_fields_is_buried_with_the_first_of_them(backend):
    """Lua passes some 8000 arguments at most; the entry must neither stay for ever nor go without a trace."""
    backend.put_raw({b"f%d" % i: b"x" for i in range(10_000)})
    stream = backend.stream()
    (delivery,) = read(stream)
    stream.dead_letter(GROUP, delivery, "no payload")
    (letter,) = backend.dead_letters()
    assert (letter[b"cause"], letter[b"f0"], letter[b"f31"]) == (b"no payload", b"x", b"x")
    assert len(letter) < 100
    assert stream.read_own_pending(GROUP, "c", max_entries=10) == []
    stream.dead_letter(GROUP, delivery, "once more")
    assert len(backend.dead_letters()) == 1
