"""What nothing names is given up (`WeightChannel.disown`): never what a manifest names, nor what is being published."""

from __future__ import annotations

import pytest

from anabranch.transport.memory_blob_store import MemoryBlobStore
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from anabranch.transport.weight_channel import WeightChannel
from tests.unit.deploy.weights_channels import Made


@pytest.fixture
def outside() -> MemoryBlobStore:
    """Stands for an object store."""
    return MemoryBlobStore()


@pytest.fixture(params=["memory", "redis"])
def channel(request: pytest.FixtureRequest, keys, outside) -> WeightChannel:
    if request.param == "memory":
        return MemoryWeightChannel(MemoryWeightStore(keys.run), outside)
    return RedisWeightChannel(request.getfixturevalue("client"), keys, blobs=outside)


def test_an_orphan_is_deleted_and_what_a_manifest_names_is_not(channel, outside, keys):
    made = Made(channel, keys.run)
    made.begin()
    orphan = outside.put(b"left behind by a hub that lost its data")
    everything = [info.digest for info in outside.list()]
    assert channel.disown(everything) == 1
    assert channel.collect_garbage() == 1
    assert {info.digest for info in outside.list()} == set(everything) - {orphan}
    assert channel.disown([]) == channel.collect_garbage() == 0


def test_a_chunk_that_is_being_published_stays(channel, outside):
    """It is announced before it is put; the commit comes later."""
    digest = channel.blobs.put(b"of a version that is not committed yet")
    assert channel.disown([digest]) == 0
    assert channel.collect_garbage() == 0
    assert [info.digest for info in outside.list()] == [digest]


def test_an_orphan_that_is_published_after_all_stays(channel, outside):
    """Between being given up and being collected."""
    digest = outside.put(b"again")
    assert channel.disown([digest]) == 1
    assert channel.blobs.put(b"again") == digest
    assert channel.collect_garbage() == 0
    assert outside.get(digest, 5) == b"again"


def test_chunks_in_redis_expire_and_committed_ones_do_not(client, keys):
    channel = RedisWeightChannel(client, keys, grace_ms=30)
    made = Made(channel, keys.run)
    made.begin()
    kept = {info.digest for info in channel.blobs.list()}
    orphan = "0" * 64
    client.set(keys.blob(orphan), b"no manifest names it")
    assert channel.disown([*kept, orphan]) == 1
    assert client.pttl(keys.blob(orphan)) in range(-2, 31)
    assert all(client.pttl(keys.blob(digest)) == -1 for digest in kept)
