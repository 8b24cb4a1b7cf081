"""What a weight channel promises of versions (transport/weight_channel.py), for every implementation; what it promises
of dropping them is in test_weight_drop.py."""

from __future__ import annotations

import pytest

from anabranch.schemas.errors import ConfigError, DeltaError, ManifestError
from anabranch.schemas.manifest import Chunk, Manifest
from tests.contract.weight_worlds import LAYOUT, chain, describe, digest_of, entry, publish, shown, v


def test_an_empty_channel_has_nothing(world):
    channel = world.open()
    assert channel.head() is None
    assert channel.manifests([(v(0), "anchor")]) == [None]
    assert channel.manifests([]) == []
    assert channel.index() == []
    assert channel.leases() == []
    assert channel.pins() == {}
    assert channel.drop([]) == []
    assert channel.collect_garbage() == 0
    assert channel.shares(v(0), "anchor") == {}


def test_epochs_ascend_over_handles(world):
    assert [world.open().open_epoch() for _ in range(3)] == [1, 2, 3]


def test_an_epoch_stays_above_that_of_a_resumed_checkpoint_and_of_the_head(world):
    """A hub that lost its data must not count from 1 again: older entries would come from the future."""
    assert world.open().open_epoch(above=7) == 8
    assert world.open().open_epoch(above=3) == 9
    publish(world.open(), world.run, "anchor", 0, epoch=12)
    assert world.open().open_epoch() == 13


def test_a_committed_version_is_the_head_and_reads_back(world):
    publisher, follower = world.open(), world.open()
    anchor = publish(publisher, world.run, "anchor", 0, payloads=(b"all of it",))
    delta = publish(publisher, world.run, "delta", 1, payloads=(b"a little", b"more"))
    assert follower.head() == v(1)
    assert follower.manifests([(v(1), "delta"), (v(1), "anchor"), (v(0), "anchor")]) == [delta, None, anchor]
    assert follower.blobs.get(delta.chunks[0].digest, 8) == b"a little"
    assert follower.layout(LAYOUT.hash) == LAYOUT
    assert follower.index() == [entry(anchor), entry(delta)]
    assert (follower.index()[1].payload_bytes, follower.index()[1].chunks) == (12, 2)


def test_the_index_ascends_over_epochs_and_can_be_read_from_a_version_on(world):
    channel = world.open()
    chain(channel, world.run, 10)
    publish(channel, world.run, "skip", 2, base=(1, 0))
    publish(channel, world.run, "fork", 4, epoch=2, base=(1, 4))
    publish(channel, world.run, "delta", 5, epoch=2, base_digest=digest_of(4))
    everything = channel.index()
    assert [e.policy for e in everything] == sorted(e.policy for e in everything)
    assert len(everything) == 14
    assert shown(channel.index(above=v(8))) == ["e1.v9 delta", "e1.v10 delta", "e2.v4 fork", "e2.v5 delta"]
    assert shown(channel.index(above=v(4, 2))) == ["e2.v5 delta"]
    assert channel.index(above=v(99, 2)) == []
    head, newer = channel.news(v(4, 2))
    assert (head, newer) == (channel.head(), channel.index(above=v(4, 2)))
    assert channel.news(v(99, 2)) == (channel.head(), [])


def test_anchors_and_skips_stand_beside_deltas_and_leave_the_head(world):
    channel = world.open()
    chain(channel, world.run, 8)
    for kind, version, base in (("skip", 2, 0), ("skip", 8, 4), ("skip", 8, 0)):
        publish(channel, world.run, kind, version, base=(1, base))
    publish(channel, world.run, "anchor", 4)
    assert channel.head() == v(8)
    assert {e.label for e in channel.index() if e.policy == v(8)} == {"delta", "skip4", "skip8"}
    assert [m.label for m in channel.manifests([(v(8), "skip8"), (v(4), "anchor")])] == ["skip8", "anchor"]


def test_a_fork_is_a_new_epochs_first_version(world):
    channel = world.open()
    chain(channel, world.run, 5)
    fork = publish(channel, world.run, "fork", 3, epoch=2, base=(1, 3))
    assert channel.head() == v(3, 2)
    publish(channel, world.run, "delta", 4, epoch=2, base_digest=fork.result_digest)
    assert channel.head() == v(4, 2)


def test_a_new_version_may_be_an_anchor(world):
    """The first of an epoch, or one that is cheaper whole."""
    channel = world.open()
    chain(channel, world.run, 2)
    publish(channel, world.run, "anchor", 3)
    publish(channel, world.run, "delta", 4)
    publish(channel, world.run, "anchor", 1, epoch=2)
    assert channel.head() == v(1, 2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda c, run: describe(c, "another", "delta", 3), "of run 'another'"),
        (lambda c, run: describe(c, run, "delta", 5), r"its base e1\.v4 is not on the channel"),
        (lambda c, run: describe(c, run, "delta", 3, base_digest="9" * 32), "its base e1.v2 has digest 0000000100"),
        (lambda c, run: describe(c, run, "delta", 2, digest="9" * 32), "another manifest stands"),
        (lambda c, run: describe(c, run, "anchor", 2, digest="9" * 32), "that version is there with digest 0000000100"),
        (lambda c, run: describe(c, run, "skip", 4, base=(1, 2)), "that version is not on the channel"),
        (lambda c, run: describe(c, run, "skip", 2, base=(1, 0), base_digest="9" * 32), "its base e1.v0 has digest"),
        (lambda c, run: describe(c, run, "skip", 2, base=(1, 0), digest="9" * 32), "that version is there with"),
        (lambda c, run: describe(c, run, "fork", 7, epoch=2, base=(1, 7)), r"its base e1\.v7 is not on the channel"),
        (lambda c, run: describe(c, run, "fork", 2, epoch=2, base=(1, 2), base_digest="9" * 32), "has digest"),
        (lambda c, run: describe(c, run, "delta", 3, layout_hash="9" * 32), "its layout is not on the channel"),
    ],
    ids=[
        "another run", "gap", "base digest", "delta again", "anchor of another state", "skip to nowhere", "skip's base",
        "skip's result", "fork of nothing", "fork of another state", "layout",
    ],
)  # fmt: skip
def test_a_manifest_that_does_not_fit_is_refused_and_changes_nothing(world, build, message):
    channel = world.open()
    chain(channel, world.run, 2)
    before = channel.index()
    base = describe(channel, world.run, "delta", 3)
    fields = build(channel, world.run)
    with pytest.raises(ManifestError, match=message):
        channel.commit(fields)
    assert channel.index() == before
    assert channel.head() == v(2)
    channel.commit(base)


def test_a_delta_must_lead_on_from_the_head(world):
    """The base is there, but a version was published on top of it: two lines in one epoch."""
    channel = world.open()
    chain(channel, world.run, 2)
    publish(channel, world.run, "anchor", 5)
    with pytest.raises(ManifestError, match=r"its base e1\.v2 is not the head, which is e1\.v5"):
        publish(channel, world.run, "delta", 3)
    with pytest.raises(ManifestError, match=r"not on the channel and the head is already at e1\.v5"):
        publish(channel, world.run, "anchor", 4)
    assert channel.head() == v(5)


def test_a_version_that_never_existed_has_no_delta(world):
    channel = world.open()
    with pytest.raises(ManifestError, match=r"its base e1\.v0 is not on the channel"):
        publish(channel, world.run, "delta", 1)
    assert channel.head() is None


def test_a_missing_chunk_is_refused_wherever_it_stands(world):
    channel = world.open()
    chain(channel, world.run, 0)
    whole = describe(channel, world.run, "delta", 1, payloads=tuple(f"{i}".encode() for i in range(2500)))
    for at in (0, 1234, 2500):
        chunks = [*whole.chunks[:at], Chunk(digest="f" * 64, size_bytes=1), *whole.chunks[at:]]
        broken = Manifest.model_validate({**dict(whole), "chunks": tuple(chunks)})
        with pytest.raises(ManifestError, match=f"chunk {'f' * 64} is not on the channel"):
            channel.commit(broken)
    assert channel.head() == v(0)
    channel.commit(whole)
    assert channel.manifests([(v(1), "delta")]) == [whole]


def test_committing_twice_is_harmless(world):
    channel, other = world.open(), world.open()
    first = publish(channel, world.run, "anchor", 0)
    second = publish(channel, world.run, "delta", 1)
    for manifest in (first, second, first):
        other.commit(manifest)
    assert channel.head() == v(1)
    assert len(channel.index()) == 2
    with pytest.raises(ManifestError, match="another manifest"):
        channel.commit(describe(channel, world.run, "delta", 1, learner_step=77))
    assert channel.manifests([(v(1), "delta")]) == [second]


def test_a_stale_learner_cannot_move_the_head(world):
    """The hub lost the number of the newest epoch, but not the head."""
    old, new = world.open(), world.open()
    chain(old, world.run, 5)
    publish(new, world.run, "fork", 3, epoch=2, base=(1, 3))
    for kind, version, more in (("delta", 6, {}), ("anchor", 9, {}), ("skip", 4, {"base": (1, 2)})):
        with pytest.raises(ConfigError, match=r"the head is already at e2\.v3: another learner"):
            publish(old, world.run, kind, version, **more)
    assert new.head() == v(3, 2)


def test_two_learners_fence_each_other(world):
    one, two = world.open(), world.open()
    first = one.open_epoch()
    chain(one, world.run, 2, epoch=first)
    second = two.open_epoch()
    with pytest.raises(ConfigError, match=f"epoch {second} has been opened"):
        publish(one, world.run, "delta", 3, epoch=first)
    publish(two, world.run, "fork", 2, epoch=second, base=(first, 2))
    third = one.open_epoch()
    with pytest.raises(ConfigError, match=f"epoch {third} has been opened"):
        publish(two, world.run, "delta", 3, epoch=second, base_digest=digest_of(2, first))
    with pytest.raises(ConfigError, match="must stop"):
        two.commit(two.manifests([(v(2, second), "fork")])[0])
    publish(one, world.run, "fork", 2, epoch=third, base=(second, 2), base_digest=digest_of(2, first))
    assert two.head() == v(2, third)


def test_shares_of_ranks_meet_under_one_manifest(world):
    ranks = [world.open() for _ in range(3)]
    for rank, channel in enumerate(ranks):
        channel.put_share(v(4), "delta", rank, f'{{"rank": {rank}}}')
        channel.put_share(v(4), "skip2", rank, "other")
    ranks[1].put_share(v(4), "delta", 1, "again")
    assert ranks[0].shares(v(4), "delta") == {0: '{"rank": 0}', 1: "again", 2: '{"rank": 2}'}
    assert ranks[0].shares(v(5), "delta") == {}
    for _ in range(2):
        ranks[0].drop_shares(v(4), "delta")
    assert ranks[0].shares(v(4), "delta") == {}
    assert len(ranks[0].shares(v(4), "skip2")) == 3


def test_an_unknown_layout_is_refused(world):
    with pytest.raises(ManifestError, match="no layout"):
        world.open().layout("a" * 32)


def test_an_altered_or_missing_chunk_is_refused(world):
    channel = world.open()
    manifest = publish(channel, world.run, "anchor", 0, payloads=(b"good bytes",))
    digest = manifest.chunks[0].digest
    world.spoil(digest, b"good bytez")
    with pytest.raises(DeltaError, match="altered"):
        channel.blobs.get(digest, 10)
    channel.blobs.put(b"good bytes")
    assert channel.blobs.get(digest, 10) == b"good bytes"
    with pytest.raises(DeltaError, match="is not in"):
        channel.blobs.get("f" * 64, 10)
