"""Consumer groups that come, fall behind, are destroyed or go for good; and entries that somebody deletes under them."""

from __future__ import annotations

import threading
import time

import pytest

from anabranch.schemas.envelope import Envelope, open_envelope
from anabranch.schemas.errors import UsageError
from anabranch.transport.redis_stream import RedisStream
from anabranch.transport.stream import GroupLag, ProducerProgress
from tests.contract.backends import SERVERS
from tests.streams import put

GROUP = "learner"


def entries(count: int, first: int = 0) -> list[Envelope]:
    return [Envelope("p", seq, seq, b"arrow") for seq in range(first, first + count)]


def read(stream, group: str = GROUP, consumer: str = "c", n: int = 100):
    return stream.read(group, consumer, max_entries=n, block_ms=0)


def seqs(deliveries) -> list[int]:
    return [open_envelope(d.fields, max_entry_bytes=10**6).seq for d in deliveries]


def test_every_way_to_ask_makes_a_group_that_is_missing(backend):
    """From the beginning: what comes twice is found by its (producer, seq), what is skipped is gone."""
    stream = backend.stream()
    put(stream, *entries(2))
    assert stream.claim_idle("a", "c", idle_ms=0, max_entries=9) == []
    assert stream.read_own_pending("b", "c", max_entries=9) == []
    assert {lag.name for lag in stream.state().groups} == {"a", "b"}
    for group in ("a", "b", GROUP):
        assert seqs(read(stream, group)) == [0, 1]


def test_a_group_that_is_missing_acknowledges_nothing_and_breaks_nothing(backend):
    stream = backend.stream()
    put(stream, *entries(1))
    (delivery,) = read(stream)
    backend.destroy_group(GROUP)
    assert stream.settle(GROUP, [(delivery.entry_id, "trained")]) == 0
    stream.dead_letter(GROUP, delivery, "unreadable")
    assert stream.trim() == 0
    assert backend.letters().count() == 0
    assert (stream.ledger(GROUP).pending, stream.ledger(GROUP).balanced) == (1, True)
    assert seqs(read(stream)) == [0]


def test_a_destroyed_group_gets_all_again_and_the_ledger_says_so(backend):
    stream = backend.stream()
    put(stream, *entries(6))
    first = read(stream, n=4)
    stream.settle(GROUP, [(d.entry_id, "trained") for d in first[1:3]])
    stream.dead_letter(GROUP, first[3], "unreadable")
    backend.destroy_group(GROUP)
    again = read(stream, n=3)
    assert seqs(again) == [0, 1, 2]
    counts = stream.ledger(GROUP)
    assert (counts.produced, counts.foreign, counts.pending, counts.balanced) == (6, 3, 6, True)
    assert stream.progress("p") == ProducerProgress(6, 0)
    stream.settle(GROUP, [(d.entry_id, "trained") for d in again])
    assert stream.progress("p") == ProducerProgress(6, 4)
    backend.destroy_group(GROUP)
    stream.settle(GROUP, [(d.entry_id, "trained") for d in read(stream)])
    counts = stream.ledger(GROUP)
    assert (counts.pending, counts.balanced, stream.progress("p").lowest_open) == (0, True, None)


@pytest.mark.parametrize("what", ["group", "stream"])
@pytest.mark.parametrize("server", SERVERS)
def test_what_goes_while_it_is_waited_for_is_made_again(client_of, keys, server, what):
    client, stream = client_of(server), RedisStream(client_of(server), keys)
    put(stream, *entries(1))
    read(stream)
    got: list[int] = []
    wait = threading.Thread(
        target=lambda: got.extend(seqs(stream.read(GROUP, "c", max_entries=9, block_ms=3000))), daemon=True
    )
    wait.start()
    time.sleep(0.1)
    if what == "group":
        client.xgroup_destroy(keys.trajectories, GROUP)
    else:
        client.delete(keys.trajectories)
        time.sleep(0.1)
        put(RedisStream(client, keys), *entries(1, first=1))
    wait.join(10)
    assert got == ([0] if what == "group" else [1])


def test_what_was_deleted_before_the_group_was_made_anew_is_lost(backend):
    stream = backend.stream()
    put(stream, *entries(4))
    first = read(stream)
    stream.settle(GROUP, [(first[0].entry_id, "trained"), (first[1].entry_id, "trained")])
    backend.delete_entry(first[2].entry_id)
    backend.destroy_group(GROUP)
    assert seqs(read(stream)) == [0, 1, 3]
    counts = stream.ledger(GROUP)
    assert (counts.fates, counts.balanced) == ({"trained": 2, "dropped:lost": 1}, True)
    assert stream.progress("p").lowest_open == 3


def test_an_entry_deleted_before_delivery_holds_no_producer_up(backend):
    """The ledger shows the loss at once; the next trim counts it, and the producer's spool lets go of it."""
    stream = backend.stream()
    put(stream, *entries(5))
    ids = [d.entry_id for d in read(stream, "recorder")]
    mine = read(stream, n=2)
    stream.settle(GROUP, [(mine[0].entry_id, "trained")])
    backend.delete_entry(ids[1])  # delivered: its holder will settle it
    backend.delete_entry(ids[2])
    backend.delete_entry(ids[4])
    assert not stream.ledger(GROUP).balanced
    stream.trim()
    counts = stream.ledger(GROUP)
    assert (counts.fates, counts.pending, counts.balanced) == ({"trained": 1, "dropped:lost": 2}, 2, True)
    assert stream.progress("p") == ProducerProgress(5, 1)
    stream.settle(GROUP, [(mine[1].entry_id, "trained"), *((d.entry_id, "trained") for d in read(stream))])
    assert stream.progress("p") == ProducerProgress(5, None)
    assert stream.ledger(GROUP).balanced


def test_a_dead_consumers_entries_are_claimed_with_their_count_and_can_be_claimed_again(backend):
    stream = backend.stream()
    put(stream, *entries(4))
    read(stream, consumer="dead")
    claimed = stream.claim_idle(GROUP, "second", idle_ms=0, max_entries=3)
    assert (seqs(claimed), [d.deliveries for d in claimed]) == ([0, 1, 2], [2, 2, 2])
    stream.settle(GROUP, [(claimed[0].entry_id, "trained")])
    third = backend.stream().claim_idle(GROUP, "third", idle_ms=0, max_entries=9)
    assert sorted(zip(seqs(third), [d.deliveries for d in third], strict=True)) == [(1, 3), (2, 3), (3, 2)]
    assert seqs(stream.read_own_pending(GROUP, "third", max_entries=9)) == [1, 2, 3]
    assert stream.read_own_pending(GROUP, "dead", max_entries=9) == []
    assert stream.settle(GROUP, [(d.entry_id, "trained") for d in third]) == 3


def test_the_state_says_where_each_group_is(backend):
    stream = backend.stream()
    assert stream.state().entries == 0
    assert stream.state().groups == ()
    put(stream, *(Envelope("p", seq, seq, bytes(5000)) for seq in range(5)))
    read(stream, n=3)
    read(stream, "recorder")
    stream.settle("recorder", [(d.entry_id, "") for d in stream.read_own_pending("recorder", "c", max_entries=9)])
    state = stream.state()
    assert state.entries == 5
    assert 20_000 < state.bytes_used < 100_000
    places = {lag.name: (lag.undelivered, lag.pending) for lag in state.groups}
    assert places == {GROUP: (2, 3), "recorder": (0, 0)}
    assert all(0 <= lag.idle_ms < 60_000 for lag in state.groups)


def test_the_idle_time_of_a_group_is_that_of_its_liveliest_consumer(backend):
    stream = backend.stream()
    put(stream, *entries(2))
    read(stream, consumer="old", n=1)
    time.sleep(0.05)
    assert stream.state().groups[0].idle_ms >= 50
    before = time.monotonic()
    read(stream, consumer="new", n=1)
    (lag,) = stream.state().groups
    assert lag.idle_ms <= 1000 * (time.monotonic() - before) + 1
    stream.settle("nobody", [("1-1", "")])
    assert [lag.name for lag in stream.state().groups] == [GROUP]


def test_a_group_without_a_consumer_has_no_idle_time(backend):
    stream = backend.stream()
    put(stream, *entries(1))
    backend.make_group("empty")
    assert stream.state().groups == (GroupLag("empty", 1, 0, None),)


def test_a_group_that_is_gone_for_good_holds_nothing_up(backend):
    stream = backend.stream()
    put(stream, *entries(3))
    stream.settle(GROUP, [(d.entry_id, "trained") for d in read(stream)])
    read(stream, "recorder", n=1)
    assert stream.trim() == 0
    assert stream.forget_group("recorder")
    assert not stream.forget_group("recorder")
    assert stream.trim() == 3
    assert stream.ledger(GROUP).balanced


def test_the_learners_group_is_never_forgotten(backend):
    stream = backend.stream()
    assert not stream.forget_group("recorder"), "there is not even a stream"
    put(stream, *entries(1))
    read(stream)
    with pytest.raises(UsageError, match="the learner's group"):
        stream.forget_group(GROUP)
    assert stream.ledger(GROUP).pending == 1


@pytest.mark.parametrize("fate", ["", "produced", "requeued", "dropped", "dropped:", "Trained"])
def test_a_fate_that_the_ledger_cannot_count_is_refused(backend, fate):
    stream = backend.stream()
    put(stream, *entries(1))
    (delivery,) = read(stream)
    with pytest.raises(UsageError, match="no fate of a group"):
        stream.settle(GROUP, [(delivery.entry_id, fate)])
    assert (stream.ledger(GROUP).pending, stream.ledger(GROUP).fates) == (1, {})


def test_looking_changes_nothing_and_gives_every_entry_once(backend):
    stream = backend.stream()
    assert stream.look(max_entries=9) == []
    put(stream, *entries(5))
    first = stream.look(max_entries=3)
    assert seqs(first) == [0, 1, 2]
    assert [d.deliveries for d in first] == [0, 0, 0]
    assert seqs(stream.look(after_id=first[-1].entry_id, max_entries=9)) == [3, 4]
    assert stream.state().groups == ()
    assert seqs(read(stream)) == [0, 1, 2, 3, 4]
    assert seqs(stream.look(max_entries=9)) == [0, 1, 2, 3, 4], "whoever has read them"
