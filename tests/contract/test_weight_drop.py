"""What a weight channel promises of dropping versions: leases, pins, shared chunks, and grace for chunks outside."""

from __future__ import annotations

import time

import pytest

from anabranch.schemas.errors import DeltaError, ManifestError
from anabranch.transport.retry import wait_until
from anabranch.transport.weight_retention import held_bytes, retain
from tests.contract.weight_worlds import chain, describe, digest_of, entry, publish, shown, v


@pytest.fixture
def channel(world):
    """Versions 0 to 8, skips over 4 from 0 and over 2 to 8, an anchor of 6: the way to 8 is anchor 6, skip2."""
    made = world.open()
    chain(made, world.run, 8)
    publish(made, world.run, "skip", 4, base=(1, 0))
    publish(made, world.run, "skip", 8, base=(1, 6))
    publish(made, world.run, "anchor", 6)
    return made


def test_all_that_leads_nowhere_needed_goes_and_the_head_stays_reachable(world, channel):
    gone = channel.drop(channel.index())
    assert shown(gone) == [
        "e1.v0 anchor", "e1.v1 delta", "e1.v2 delta", "e1.v3 delta", "e1.v4 delta", "e1.v4 skip4", "e1.v5 delta",
        "e1.v6 delta", "e1.v7 delta",
    ]  # fmt: skip
    assert shown(channel.index()) == ["e1.v6 anchor", "e1.v8 delta", "e1.v8 skip2"]
    assert channel.head() == v(8)
    assert channel.manifests([(e.policy, e.label) for e in gone]) == [None] * len(gone)
    assert channel.drop(gone) == []
    publish(channel, world.run, "delta", 9)


def test_a_lease_protects_its_version_and_all_after_it(world, channel):
    follower = world.open()
    follower.lease("eu-1", v(3), ttl_ms=60_000)
    follower.lease("us-1", v(5), ttl_ms=60_000)
    assert {(lease.holder, lease.policy) for lease in channel.leases()} == {("eu-1", v(3)), ("us-1", v(5))}
    assert all(55_000 < lease.expires_in_ms <= 60_000 for lease in channel.leases())
    assert [e.policy for e in channel.drop(channel.index())] == [v(0), v(1), v(2)]
    follower.lease("eu-1", v(6), ttl_ms=60_000)
    assert {e.policy for e in channel.drop(channel.index())} == {v(3), v(4)}
    follower.release("us-1")
    assert [e.policy for e in channel.drop(channel.index())] == [v(5)]
    follower.release("eu-1")
    follower.release("nobody")
    assert shown(channel.drop(channel.index())) == ["e1.v6 delta", "e1.v7 delta"]
    assert channel.leases() == []


def test_a_lease_ends_by_itself(world, channel):
    channel.lease("gone", v(0), ttl_ms=800)
    assert channel.drop(channel.index()) == []
    wait_until(lambda: not channel.leases(), deadline_s=10, what="the lease to end")
    assert len(channel.drop(channel.index())) == 9


def test_a_lease_of_an_older_epoch_protects_the_newer_ones(world, channel):
    channel.lease("behind", v(7), ttl_ms=60_000)
    publish(channel, world.run, "fork", 6, epoch=2, base=(1, 6))
    publish(channel, world.run, "anchor", 7, epoch=2)
    publish(channel, world.run, "delta", 8, epoch=2)
    gone = channel.drop(channel.index())
    assert {e.policy for e in gone} == {v(i) for i in range(7)}
    channel.lease("behind", v(8, 2), ttl_ms=60_000)
    channel.drop(channel.index())
    assert shown(channel.index()) == ["e2.v7 anchor", "e2.v8 delta"]


def test_a_lease_taken_between_the_decision_and_the_drop_counts(world, channel):
    decided = channel.index()
    world.open().lease("quick", v(4), ttl_ms=60_000)
    assert {e.policy for e in channel.drop(decided)} == {v(0), v(1), v(2), v(3)}


def test_a_pin_keeps_its_version_and_the_way_there(world, channel):
    world.open().pin(v(5), "the good one")
    assert channel.pins() == {v(5): "the good one"}
    gone = shown(channel.drop(channel.index()))
    assert gone == ["e1.v1 delta", "e1.v2 delta", "e1.v3 delta", "e1.v4 delta", "e1.v6 delta", "e1.v7 delta"]
    assert {"e1.v0 anchor", "e1.v4 skip4", "e1.v5 delta"} <= set(shown(channel.index()))
    channel.pin(v(5), "best")
    assert channel.pins() == {v(5): "best"}
    assert channel.unpin(v(5))
    assert not channel.unpin(v(5))
    assert shown(channel.drop(channel.index())) == ["e1.v0 anchor", "e1.v4 skip4", "e1.v5 delta"]


def test_what_cannot_be_reached_cannot_be_pinned(world, channel):
    with pytest.raises(ManifestError, match=r"e1\.v9 cannot be pinned"):
        channel.pin(v(9), "not there")
    channel.drop([e for e in channel.index() if e.policy == v(0)])
    with pytest.raises(ManifestError, match=r"e1\.v5 cannot be pinned"):
        channel.pin(v(5), "its anchor is gone")
    assert channel.pins() == {}


def test_a_fork_keeps_the_version_that_it_is(world):
    channel = world.open()
    chain(channel, world.run, 6)
    publish(channel, world.run, "fork", 3, epoch=2, base=(1, 3))
    assert {e.policy for e in channel.drop(channel.index())} == {v(4), v(5), v(6)}
    publish(channel, world.run, "delta", 4, epoch=2, base_digest=digest_of(3))
    assert channel.drop(channel.index()) == []


def test_what_was_never_there_is_not_dropped(world, channel):
    other = describe(channel, world.run, "delta", 7, payloads=(b"other size",))
    assert channel.drop([entry(other)]) == []
    assert len(channel.index()) == 12


def test_chunks_go_with_the_last_manifest_that_names_them(world):
    channel = world.open(grace_ms=0)
    first = publish(channel, world.run, "anchor", 0, payloads=(b"shared", b"own", b"own"))
    publish(channel, world.run, "delta", 1, payloads=(b"shared",))
    third = publish(channel, world.run, "anchor", 2, payloads=(b"shared",))
    assert len(world.chunks()) == 2
    assert len(channel.drop(channel.index())) == 2
    channel.collect_garbage()
    assert world.chunks() == {third.chunks[0].digest}
    assert channel.blobs.get(first.chunks[0].digest, 6) == b"shared"
    publish(channel, world.run, "anchor", 3, payloads=())
    channel.drop(channel.index())
    channel.collect_garbage()
    assert world.chunks() == set()
    with pytest.raises(DeltaError, match="is not in"):
        channel.blobs.get(first.chunks[0].digest, 6)


def test_a_chunk_put_again_outlives_the_drop_of_who_named_it_until_its_commit(world):
    """A learner that resumes makes the same chunks again, while retention drops the old epoch."""
    channel = world.open(grace_ms=0)
    publish(channel, world.run, "anchor", 0, payloads=(b"same again",))
    publish(channel, world.run, "anchor", 1)
    manifest = describe(channel, world.run, "delta", 2, payloads=(b"same again",))
    assert len(channel.drop(channel.index())) == 1
    channel.collect_garbage()
    channel.commit(manifest)
    assert channel.blobs.get(manifest.chunks[0].digest, 10) == b"same again"
    publish(channel, world.run, "anchor", 3)
    channel.drop(channel.index())
    channel.collect_garbage()
    assert manifest.chunks[0].digest not in world.chunks(), "once it was committed it goes with its manifest"


def test_chunks_outside_are_kept_for_a_grace(world):
    channel = world.open()
    chain(channel, world.run, 0)
    held = world.chunks()
    publish(channel, world.run, "anchor", 1)
    channel.drop(channel.index())
    assert channel.collect_garbage() == 0
    assert held <= world.chunks() if world.chunks_outside else not held & world.chunks()


def test_a_commit_takes_a_chunk_out_of_the_garbage(world):
    """Chunks outside: dropped, and named again before the grace is over; only then the grace ends."""
    channel = world.open(grace_ms=400)
    first = publish(channel, world.run, "anchor", 0, payloads=(b"comes back",))
    publish(channel, world.run, "anchor", 1, payloads=(b"is gone",))
    publish(channel, world.run, "anchor", 2)
    channel.drop(channel.index())
    again = publish(channel, world.run, "delta", 3, payloads=(b"comes back",))
    time.sleep(0.5)
    channel.collect_garbage()
    assert channel.blobs.get(again.chunks[0].digest, 10) == b"comes back"
    assert first.chunks == again.chunks
    assert len(world.chunks()) == 2


def test_retention_comes_down_to_its_budget_and_names_who_holds_it_up(world, channel):
    size = held_bytes(channel.index())
    oldest = channel.index()[:2]
    done = retain(channel, size - 1)
    assert done.dropped == oldest[:1]
    assert (done.bytes_before, done.bytes_after) == (size, size - held_bytes(oldest[:1]))
    assert done.held_by == []
    channel.lease("slow", v(2), ttl_ms=60_000)
    channel.lease("quick", v(8), ttl_ms=60_000)
    done = retain(channel, 0)
    assert done.dropped == oldest[1:]
    assert [lease.holder for lease in done.held_by] == ["slow"]
    channel.release("slow")
    done = retain(channel, 0)
    assert done.held_by == []
    assert done.bytes_after == held_bytes(channel.index())
    assert shown(channel.index()) == ["e1.v6 anchor", "e1.v8 delta", "e1.v8 skip2"]
