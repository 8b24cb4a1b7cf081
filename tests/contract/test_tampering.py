"""Somebody reaches into the Redis behind the pipeline's back: the ledger shows it, and nothing breaks."""

from __future__ import annotations

import pytest

from anabranch.schemas.envelope import Envelope
from anabranch.transport.memory_stream import MemoryStream, MemoryStreamStore
from anabranch.transport.redis_stream import RedisStream

GROUP = "learner"


@pytest.fixture
def stream(client, keys) -> RedisStream:
    made = RedisStream(client, keys)
    for seq in range(5):
        made.append(Envelope("p", seq, seq, b"x"))
    return made


def read(stream: RedisStream, consumer: str = "c", n: int = 100):
    return stream.read(GROUP, consumer, max_entries=n, block_ms=0)


def test_a_group_made_in_mid_stream_shows_as_a_loss(stream, client, keys):
    second = client.xrange(keys.trajectories)[1][0]
    client.xgroup_create(keys.trajectories, GROUP, id=second)
    counts = stream.ledger(GROUP)
    assert (counts.produced, counts.pending, counts.balanced) == (5, 3, False)


def test_entries_deleted_before_delivery_show_as_a_loss(stream, client, keys):
    read(stream, n=1)
    client.xdel(keys.trajectories, client.xrange(keys.trajectories)[2][0])
    counts = stream.ledger(GROUP)
    assert (counts.produced, counts.pending, counts.balanced) == (5, 4, False)


def test_a_delivered_entry_whose_data_is_gone_ends_as_lost(stream, client, keys):
    got = read(stream, "c", n=3)
    client.xdel(keys.trajectories, got[1].entry_id)
    pending = stream.read_own_pending(GROUP, "c", max_entries=1)
    pending += stream.read_own_pending(GROUP, "c", max_entries=9, after_id=pending[0].entry_id)
    assert [d.entry_id for d in pending] == [got[0].entry_id, got[2].entry_id]
    client.xdel(keys.trajectories, got[0].entry_id)
    assert [d.entry_id for d in stream.claim_idle(GROUP, "d", idle_ms=0, max_entries=9)] == [got[2].entry_id]
    counts = stream.ledger(GROUP)
    assert counts.fates == {"dropped:lost": 2}
    assert (counts.pending, counts.balanced) == (3, True)


def test_the_twin_counts_lost_entries_too():
    store = MemoryStreamStore()
    stream = MemoryStream(store)
    for seq in range(2):
        stream.append(Envelope("p", seq, seq, b"x"))
    stream.read(GROUP, "c", max_entries=9, block_ms=0)
    del store.entries[next(iter(store.entries))]
    assert len(stream.read_own_pending(GROUP, "c", max_entries=9)) == 1
    assert stream.ledger(GROUP).fates == {"dropped:lost": 1}
    assert stream.ledger(GROUP).balanced


def test_a_lost_group_begins_again_so_that_nothing_unread_is_skipped(stream, client, keys):
    held = read(stream, n=2)
    client.xgroup_destroy(keys.trajectories, GROUP)
    assert stream.settle(GROUP, [(held[0].entry_id, "trained")]) == 0
    assert [d.entry_id for d in read(stream)][:2] == [d.entry_id for d in held]
    assert stream.ledger(GROUP).balanced


def test_a_flushed_server_is_an_empty_stream(stream, client, keys):
    read(stream)
    for key in client.keys(f"ab:{keys.run}:*"):
        client.delete(key)
    assert read(stream) == []
    assert stream.claim_idle(GROUP, "c", idle_ms=0, max_entries=9) == []
    assert stream.read_own_pending(GROUP, "c", max_entries=9) == []
    assert stream.trim() == 0
    assert stream.append(Envelope("p", 0, 0, b"x")), "it comes again from the producer"
    assert stream.ledger(GROUP).balanced
