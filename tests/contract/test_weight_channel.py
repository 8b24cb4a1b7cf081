"""What a weight channel promises (transport/weight_channel.py), for every implementation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from anabranch.schemas.errors import ConfigError, DeltaError, ManifestError
from anabranch.schemas.keys import Keys
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Chunk, Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from anabranch.transport.weight_channel import WeightChannel
from anabranch.transport.weight_rules import droppable

LAYOUT = Layout.build([("w", "bf16", (4, 8))])


@dataclass
class World:
    run: str
    open: Callable[[], WeightChannel]
    spoil_blob: Callable[[str, bytes], object]
    blob_count: Callable[[], int]


@pytest.fixture(params=["memory", "redis"])
def world(request: pytest.FixtureRequest, keys: Keys) -> Iterator[World]:
    if request.param == "memory":
        store = MemoryWeightStore(keys.run)
        yield World(keys.run, lambda: MemoryWeightChannel(store), store.blobs.__setitem__, lambda: len(store.blobs))
        return
    valkey, client = request.getfixturevalue("valkey"), request.getfixturevalue("client")
    opened: list[RedisWeightChannel] = []

    def make() -> RedisWeightChannel:
        opened.append(RedisWeightChannel(connect(valkey.url, deadline_s=10, what="the test hub"), keys))
        return opened[-1]

    yield World(
        keys.run,
        make,
        lambda digest, payload: client.set(keys.blob(digest), payload),
        lambda: len(client.keys(keys.blob("*"))),
    )
    for channel in opened:
        channel.close()


def publish(
    channel: WeightChannel,
    run: str,
    epoch: int,
    version: int,
    kind: str = "delta",
    payload: bytes | None = None,
    **more,
) -> Manifest:
    channel.put_layout(LAYOUT)
    payload = f"{epoch}.{version}.{kind}".encode() if payload is None else payload
    manifest = describe(run, epoch, version, kind, channel.put_blob(payload), len(payload), **more)
    channel.commit(manifest)
    return manifest


def describe(run: str, epoch: int, version: int, kind: str, digest: str, size: int, **more) -> Manifest:
    base = {"base_version": version - 1, "base_digest": "0" * 32} if kind == "delta" else {}
    return Manifest(
        **{
            "kind": kind,
            "run": run,
            "epoch": epoch,
            "version": version,
            "result_digest": "1" * 32,
            "layout_hash": LAYOUT.hash,
            "codec": "test/1",
            "chunks": (Chunk(digest=digest, size_bytes=size),),
            "full_bytes": 64,
            "changed_elements": 1,
            "total_elements": 32,
            "learner_step": version,
            "fork_version": 0,
            "published_ms": 0,
            **base,
            **more,
        }
    )


def test_an_empty_channel_has_no_head(world):
    channel = world.open()
    assert channel.head() is None
    assert channel.manifest(PolicyVersion(1, 0), "anchor") is None
    assert channel.newest_anchor(1, 100) is None
    assert channel.retain(2) == 0


def test_epochs_ascend_over_handles(world):
    assert [world.open().open_epoch() for _ in range(3)] == [1, 2, 3]


def test_an_epoch_stays_above_that_of_a_resumed_checkpoint(world):
    """A hub that lost its data must not count from 1 again: older entries would come from the future."""
    assert world.open().open_epoch(above=7) == 8
    assert world.open().open_epoch(above=3) == 9


def test_a_committed_version_is_the_head_and_reads_back(world):
    publisher, follower = world.open(), world.open()
    anchor = publish(publisher, world.run, 1, 0, "anchor", b"all of it")
    delta = publish(publisher, world.run, 1, 1, payload=b"a little")
    assert follower.head() == PolicyVersion(1, 1)
    assert follower.manifest(PolicyVersion(1, 0), "anchor") == anchor
    assert follower.manifest(PolicyVersion(1, 1), "delta") == delta
    assert follower.manifest(PolicyVersion(1, 1), "anchor") is None
    assert follower.blob(delta.chunks[0].digest) == b"a little"
    assert follower.layout(LAYOUT.hash) == LAYOUT


def test_an_altered_or_missing_chunk_is_refused(world):
    channel = world.open()
    digest = channel.put_blob(b"good bytes")
    assert digest == xxhash.xxh3_128_hexdigest(b"good bytes")
    world.spoil_blob(digest, b"good bytez")
    with pytest.raises(DeltaError, match="altered"):
        channel.blob(digest)
    with pytest.raises(DeltaError, match="not on the channel"):
        channel.blob("f" * 32)


def test_publishing_the_same_bytes_again_heals_an_altered_chunk(world):
    channel = world.open()
    manifest = publish(channel, world.run, 1, 0, "anchor", b"all of it")
    digest = manifest.chunks[0].digest
    world.spoil_blob(digest, b"all of him")
    channel.put_blob(b"all of it")
    assert channel.blob(digest) == b"all of it"


def test_an_unknown_layout_is_refused(world):
    with pytest.raises(ManifestError, match="no layout"):
        world.open().layout("a" * 32)


def test_a_manifest_whose_parts_are_missing_is_refused_and_the_head_stays(world):
    channel = world.open()
    digest = channel.put_blob(b"x")
    with pytest.raises(ManifestError, match="layout"):
        channel.commit(describe(world.run, 1, 0, "anchor", digest, 1))
    channel.put_layout(LAYOUT)
    with pytest.raises(ManifestError, match="chunk"):
        channel.commit(describe(world.run, 1, 0, "anchor", "f" * 32, 1))
    assert channel.head() is None


def test_a_manifest_of_another_run_is_refused(world):
    channel = world.open()
    with pytest.raises(ManifestError, match="another"):
        publish(channel, "another", 1, 0, "anchor")


def test_a_stale_learner_cannot_move_the_head_back(world):
    old, new = world.open(), world.open()
    publish(old, world.run, 1, 5, "anchor")
    with pytest.raises(ConfigError, match="head is already"):
        publish(old, world.run, 1, 4)
    publish(new, world.run, 2, 3, "anchor")
    with pytest.raises(ConfigError, match="head is already"):
        publish(old, world.run, 1, 6)
    assert new.head() == PolicyVersion(2, 3)


def test_opening_an_epoch_fences_the_learner_before(world):
    old, new = world.open(), world.open()
    epoch = old.open_epoch()
    publish(old, world.run, epoch, 0, "anchor")
    new.open_epoch()
    with pytest.raises(ConfigError, match="must stop"):
        publish(old, world.run, epoch, 1)
    assert new.head() == PolicyVersion(epoch, 0)


def test_anchor_and_delta_of_one_version_stand_side_by_side(world):
    channel = world.open()
    publish(channel, world.run, 1, 1)
    publish(channel, world.run, 1, 1, "anchor")
    assert channel.manifest(PolicyVersion(1, 1), "anchor").kind == "anchor"
    assert channel.manifest(PolicyVersion(1, 1), "delta").kind == "delta"


def test_committing_twice_is_harmless_but_a_version_never_changes(world):
    channel = world.open()
    manifest = publish(channel, world.run, 1, 0, "anchor")
    channel.commit(manifest)
    with pytest.raises(ManifestError, match="another manifest"):
        publish(channel, world.run, 1, 0, "anchor", result_digest="2" * 32)
    assert channel.manifest(PolicyVersion(1, 0), "anchor") == manifest


def test_the_newest_anchor_is_found_within_its_epoch(world):
    channel = world.open()
    publish(channel, world.run, 1, 0, "anchor")
    for version in range(1, 5):
        publish(channel, world.run, 1, version)
        if version == 3:
            publish(channel, world.run, 1, version, "anchor")
    publish(channel, world.run, 2, 4, "anchor")
    assert channel.newest_anchor(1, 2).version == 0
    assert channel.newest_anchor(1, 3).version == 3
    assert channel.newest_anchor(1, 99).version == 3
    assert channel.newest_anchor(2, 99).policy == PolicyVersion(2, 4)
    assert channel.newest_anchor(2, 3) is None


def test_retention_keeps_the_anchor_below_the_line_and_all_after_it(world):
    channel = world.open()
    for version in range(8):
        publish(channel, world.run, 1, version, "anchor" if version in (0, 2, 5) else "delta")
    assert channel.retain(3) == 2, "line at 4, anchor at 2: versions 0 and 1 go"
    assert channel.retain(3) == 0
    assert channel.manifest(PolicyVersion(1, 1), "delta") is None
    assert channel.newest_anchor(1, 4).version == 2
    assert world.blob_count() == 6
    assert channel.retain(0) == 3, "line at the head, anchor at 5"
    assert channel.manifest(PolicyVersion(1, 5), "anchor") is not None
    assert channel.head() == PolicyVersion(1, 7)


def test_a_chunk_shared_by_manifests_lives_as_long_as_one_of_them(world):
    channel = world.open()
    first = publish(channel, world.run, 1, 0, "anchor", b"same")
    publish(channel, world.run, 1, 1, "delta", b"same")
    publish(channel, world.run, 1, 2, "anchor", b"same")
    channel.retain(0)
    assert channel.manifest(PolicyVersion(1, 0), "anchor") is None
    assert channel.blob(first.chunks[0].digest) == b"same"
    publish(channel, world.run, 1, 3, "anchor", b"other")
    channel.retain(0)
    with pytest.raises(DeltaError):
        channel.blob(first.chunks[0].digest)


def test_chunks_nobody_committed_expire_and_committed_ones_do_not(client, keys):
    channel = RedisWeightChannel(client, keys)
    orphan = channel.put_blob(b"orphan")
    manifest = publish(channel, keys.run, 1, 0, "anchor", b"kept")
    assert channel.put_blob(b"kept") == manifest.chunks[0].digest
    assert client.pttl(keys.blob(orphan)) > 0
    assert client.pttl(keys.blob(manifest.chunks[0].digest)) == -1


def test_whoever_sees_a_head_can_read_all_of_it(world):
    """Followers race the publisher and its retention."""
    publisher, follower = world.open(), world.open()
    failures: list[str] = []
    done = threading.Event()

    def follow() -> None:
        while not done.is_set():
            head = follower.head()
            if head is None:
                continue
            manifest = follower.manifest(head, "anchor" if head.version % 5 == 0 else "delta")
            if manifest is None:
                failures.append(f"{head} has no manifest")
                return
            follower.blob(manifest.chunks[0].digest)

    thread = threading.Thread(target=follow)
    thread.start()
    for version in range(60):
        publish(publisher, world.run, 1, version, "anchor" if version % 5 == 0 else "delta")
        publisher.retain(10)
    done.set()
    thread.join(10)
    assert failures == []


@given(
    kinds=st.lists(st.sampled_from([("anchor",), ("delta",), ("delta", "anchor")]), max_size=30),
    keep=st.integers(0, 12),
)
def test_what_retention_leaves_begins_with_an_anchor(kinds, keep):
    committed = [(PolicyVersion(1, v), kind) for v, both in enumerate(kinds) for kind in both]
    gone = droppable(committed, keep)
    kept = committed[len(gone) :]
    assert gone == committed[: len(gone)]
    assert {p for p, _ in gone}.isdisjoint({p for p, _ in kept})
    if gone:
        assert "anchor" in {kind for policy, kind in kept if policy == kept[0][0]}
    versions = {p.version for p, _ in kept}
    assert set(range(max(0, len(kinds) - 1 - keep), len(kinds))) <= versions
