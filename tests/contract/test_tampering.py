"""Somebody reaches into the Redis behind the pipeline's back: the ledger shows it, and nothing breaks."""

from __future__ import annotations

import json

import pytest
from redis import exceptions

from anabranch.schemas.envelope import Envelope
from anabranch.schemas.errors import AnabranchError, DeltaError, ManifestError, StreamUnavailableError
from anabranch.transport.memory_stream import MemoryStream, MemoryStreamStore
from anabranch.transport.redis_stream import RedisStream
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from anabranch.transport.signing import Verifier
from tests.contract.weight_worlds import LAYOUT, chain, describe, publish, shown, v
from tests.streams import put

GROUP = "learner"


@pytest.fixture
def stream(client, keys) -> RedisStream:
    made = RedisStream(client, keys)
    put(made, *(Envelope("p", seq, seq, b"x") for seq in range(5)))
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
    put(stream, *(Envelope("p", seq, seq, b"x") for seq in range(2)))
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
    assert put(stream, Envelope("p", 0, 0, b"x")), "it comes again from the producer"
    assert stream.ledger(GROUP).balanced


@pytest.fixture
def weights(client, keys) -> RedisWeightChannel:
    made = RedisWeightChannel(client, keys)
    chain(made, keys.run, 4)
    return made


def read_back(weights: RedisWeightChannel) -> object:
    return weights.manifests([(v(2), "delta"), (v(3), "delta")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not a weight manifest"),
        (b"\xff" * 100, "not a weight manifest"),
        (b"[" * 100_000, "not a weight manifest"),
        (b'{"format":"anabranch.manifest/2"}', "not a weight manifest"),
    ],
)
def test_a_forged_manifest_is_refused(weights, client, keys, text, message):
    client.set(keys.manifest(1, 3, "delta"), text)
    with pytest.raises(ManifestError, match=message):
        read_back(weights)


@pytest.mark.parametrize("cut", [1, 100, 300])
def test_a_truncated_manifest_is_refused(weights, client, keys, cut):
    key = keys.manifest(1, 3, "delta")
    client.set(key, client.get(key)[:-cut])
    with pytest.raises(ManifestError, match="not a weight manifest"):
        read_back(weights)


def test_a_manifest_in_anothers_place_is_refused(weights, client, keys):
    client.copy(keys.manifest(1, 2, "delta"), keys.manifest(1, 3, "delta"), replace=True)
    with pytest.raises(ManifestError, match=r"stored as delta e1\.v3 of run .* is delta e1\.v2"):
        read_back(weights)


def test_a_manifest_of_another_run_is_refused(weights, client, keys):
    key = keys.manifest(1, 3, "delta")
    client.set(key, json.dumps({**json.loads(client.get(key)), "run": "other"}))
    with pytest.raises(ManifestError, match="of run 'other': it was put there by somebody else"):
        read_back(weights)


def test_a_manifest_injected_by_who_holds_the_redis_has_no_signature(weights, client, keys):
    """All of it fits together: only the signature tells."""
    publish(weights, keys.run, "delta", 5, payloads=(b"injected weights",))
    (manifest,) = weights.manifests([(v(5), "delta")])
    with pytest.raises(ManifestError, match="it is not signed"):
        Verifier(["48075a597e721a156e2e0799de5cc0c5324dc6e7eaf1cdd46250868ec53215dd"]).check(manifest)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        '{"epoch": 1}',
        '{"epoch": "a", "version": 1}',
        "[1, 2]",
        "null",
        '{"epoch": 1e999, "version": 1}',
        '{"epoch": 1, "version": -1}',
        '{"epoch": 1, "version": 1.5}',
        '{"epoch": 1, "version": 4294967296}',
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_a_head_that_is_not_readable_is_refused(weights, client, keys, text):
    client.set(keys.head, text)
    with pytest.raises(ManifestError, match=r"the head of run .* is not readable"):
        weights.head()


@pytest.mark.parametrize("member", ["", "nonsense", "1:3:delta:1:2:x:1:00", b"\xff\xfe"])
def test_a_foreign_entry_of_the_index_is_refused(weights, client, keys, member):
    client.zadd(keys.weight_index, {member: 2**32 + 3})
    with pytest.raises(ManifestError, match="not an entry of the weight index"):
        weights.index()


@pytest.mark.parametrize("reply", [7, [b"one"], {b"a": b"b"}, None, True], ids=str)
def test_replies_of_another_shape_end_as_an_error_with_a_name(weights, client, monkeypatch, reply):
    """A region's Redis may be anybody's: a reply that no Redis gives must not look like a mistake of our own."""
    for command in ("get", "mget", "zrangebyscore"):
        monkeypatch.setattr(client, command, lambda *_, **__: reply)
    for read in (weights.head, weights.index, lambda: read_back(weights), lambda: weights.blobs.get("0" * 64, 3)):
        if (reply, read) != (None, weights.head):  # that is a channel without a version
            with pytest.raises((ManifestError, DeltaError)):
                read()


def test_who_does_not_speak_redis_is_a_server_that_cannot_be_reached(weights, client, monkeypatch):
    def get(*_):
        raise exceptions.InvalidResponse("Protocol Error: b'HTTP/1.1 400 Bad Request'")

    monkeypatch.setattr(client, "get", get)
    with pytest.raises(StreamUnavailableError, match="does not speak Redis"):
        weights._guard.once(lambda: client.get("x"))


@pytest.mark.parametrize("field", ["published_ms", "learner_step", "full_bytes", "changed_elements"])
def test_numbers_that_no_state_has_are_refused(weights, client, keys, field):
    """They would overflow the header of the node's mirror."""
    key = keys.manifest(1, 3, "delta")
    client.set(key, json.dumps({**json.loads(client.get(key)), field: 2**64}))
    with pytest.raises(ManifestError, match="not a weight manifest"):
        read_back(weights)


def test_an_altered_layout_is_refused(weights, client, keys):
    client.set(keys.layout(LAYOUT.hash), client.get(keys.layout(LAYOUT.hash)).replace(b"[4,8]", b"[8,4]"))
    with pytest.raises(ManifestError, match=r"has hash .*: it was altered|not a layout"):
        weights.layout(LAYOUT.hash)


def test_a_manifest_that_is_gone_leaves_the_rest(weights, client, keys):
    """Its entry leads to nothing: a follower sees None, and the entry can be dropped."""
    client.delete(keys.manifest(1, 2, "delta"))
    assert read_back(weights)[0] is None
    assert read_back(weights)[1] is not None
    publish(weights, keys.run, "anchor", 5)
    assert "e1.v2 delta" in shown(weights.drop(weights.index()))


def test_a_flushed_hub_is_an_empty_channel_and_a_learner_can_begin_anew(weights, client, keys):
    following = describe(weights, keys.run, "delta", 5)
    for key in client.keys(f"ab:{keys.run}:*"):
        client.delete(key)
    assert weights.head() is None
    assert weights.index() == []
    with pytest.raises(ManifestError, match=r"its base e1\.v4 is not on the channel"):
        weights.commit(following)
    epoch = weights.open_epoch(above=1)
    publish(weights, keys.run, "anchor", 4, epoch=epoch)
    assert weights.head() == v(4, epoch)


UNREADABLE = [
    b"", b"not JSON", b"[" * 100_000, b"7", b"null", b"[1, 2]", b"{}", b'{"epoch":1}', b'{"epoch":"x","version":1}',
    b'{"epoch":1.5,"version":1}', b'{"epoch":-1,"version":1}', b'{"epoch":NaN,"version":1}', b"\xff",
]  # fmt: skip


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_head_that_is_not_readable_is_named_and_nothing_is_written(weights, client, keys, text):
    manifest = describe(weights, keys.run, "delta", 5)
    gone = weights.index()[0]
    client.set(keys.head, text)
    before = {key: client.dump(key) for key in client.scan_iter(f"ab:{keys.run}:*") if b":blob:" not in key}
    calls = [lambda: weights.commit(manifest), weights.head, lambda: weights.drop([gone])]
    if text != b'{"epoch":1}':  # all that is asked of it there
        calls.append(weights.open_epoch)
    for call in calls:
        with pytest.raises(ManifestError, match=rf"the head of run '{keys.run}' is not readable"):
            call()
    assert {key: client.dump(key) for key in before} == before


@pytest.mark.parametrize("text", [b"", b"x", b"-1", b"1.5"])
def test_an_epoch_that_is_not_readable_is_named(weights, client, keys, text):
    manifest = describe(weights, keys.run, "delta", 5)
    client.set(keys.epoch, text)
    for call in (lambda: weights.commit(manifest), weights.open_epoch):
        with pytest.raises(ManifestError, match=rf"the number of the epoch that is open of run '{keys.run}' is not"):
            call()
    assert weights.head() == v(4)


def test_a_key_of_another_type_is_not_taken_for_an_old_server(weights, client, keys):
    client.delete(keys.head)
    client.lpush(keys.head, "x")
    for call in (weights.head, weights.open_epoch):
        with pytest.raises(AnabranchError, match="somebody else wrote to a key of this run"):
            call()


def test_a_head_that_was_not_readable_is_mended_by_its_removal_and_a_new_epoch(weights, client, keys):
    assert weights.open_epoch() == 2  # the hub keeps count of epochs apart from the head
    client.set(keys.head, "not JSON")
    client.delete(keys.head)
    assert weights.head() is None
    epoch = weights.open_epoch()
    assert epoch == 3
    publish(weights, keys.run, "fork", 4, epoch=epoch, base=(1, 4))
    assert weights.head() == v(4, epoch)
