"""Chunks in a store outside of Redis: collected when nobody names them, and never between their `put` and their commit."""

from __future__ import annotations

import threading

import pytest
from blake3 import blake3

from anabranch.schemas.errors import ManifestError, StreamUnavailableError
from anabranch.transport import memory_weight_channel, redis_weight_channel
from tests.contract.weight_worlds import chain, describe, publish, v


class HeldStore:
    """A blob store whose `delete` waits."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.put, self.get, self.list, self.close = inner.put, inner.get, inner.list, inner.close

    def delete(self, digests) -> None:
        self.entered.set()
        assert self.go_on.wait(20)
        self.inner.delete(digests)


# Chunks beside the manifests go in one transaction: there is no garbage.
with_garbage = pytest.mark.parametrize(
    "world", ["memory, chunks outside", "valkey, chunks outside", "redis 7.0, chunks outside"], indirect=True
)


def outside(world, channel):
    assert world.chunks_outside
    held = HeldStore(channel.blobs.inner)
    channel._outside = held
    return held


@with_garbage
def test_a_chunk_that_is_put_while_it_is_collected_is_put_after_that(world):
    collector, learner = world.open(grace_ms=0), world.open()
    held = outside(world, collector)
    chain(collector, world.run, 0)
    publish(collector, world.run, "anchor", 1)
    payload = f"1.0.anchor.{None}".encode()
    collector.drop(collector.index())
    thread = threading.Thread(target=collector.collect_garbage)
    thread.start()
    assert held.entered.wait(10)
    again = threading.Thread(target=publish, args=(learner, world.run, "delta", 2), kwargs={"payloads": (payload,)})
    again.start()
    again.join(0.3)
    assert again.is_alive(), "it waits for the collector"
    held.go_on.set()
    thread.join(10)
    again.join(10)
    assert learner.head() == v(2)
    assert learner.blobs.get(blake3(payload).hexdigest(), len(payload)) == payload


@with_garbage
def test_a_chunk_put_and_not_committed_is_not_collected_though_it_was_garbage(world):
    channel = world.open(grace_ms=0)
    outside(world, channel).go_on.set()
    first = publish(channel, world.run, "anchor", 0, payloads=(b"again",))
    publish(channel, world.run, "anchor", 1)
    channel.drop(channel.index())
    manifest = describe(channel, world.run, "delta", 2, payloads=(b"again",))
    assert channel.collect_garbage() == 0
    channel.commit(manifest)
    assert channel.blobs.get(first.chunks[0].digest, 5) == b"again"


@with_garbage
def test_a_collected_chunk_cannot_be_named_without_being_put_again(world):
    channel = world.open(grace_ms=0)
    outside(world, channel).go_on.set()
    chain(channel, world.run, 0)
    publish(channel, world.run, "anchor", 1)
    old = channel.manifests([(v(0), "anchor")])[0]
    channel.drop(channel.index())
    assert channel.collect_garbage() == 1
    manifest = describe(channel, world.run, "delta", 2)
    with pytest.raises(ManifestError, match="is not on the channel; store it"):
        channel.commit(manifest.model_copy(update={"chunks": old.chunks}))


@with_garbage
def test_what_a_dead_collector_claimed_is_collected_by_the_next(world, monkeypatch):
    channel = world.open(grace_ms=0)
    held = outside(world, channel)
    held.delete = lambda digests: (_ for _ in ()).throw(StreamUnavailableError("the store is away"))
    chain(channel, world.run, 0)
    publish(channel, world.run, "anchor", 1)
    channel.drop(channel.index())
    with pytest.raises(StreamUnavailableError):
        channel.collect_garbage()
    assert world.open().collect_garbage() == 0, "the claim counts"
    for module in (memory_weight_channel, redis_weight_channel):
        monkeypatch.setattr(module, "CLAIM_MS", -1)
    assert world.open().collect_garbage() == 1
    assert len(world.chunks()) == 1
