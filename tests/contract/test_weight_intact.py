"""`first_broken` over every kind of store: what it must find, and that it finds nothing where nothing is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from anabranch.schemas.errors import ManifestError, StreamUnavailableError
from anabranch.transport.blob_store import BlobStore
from anabranch.transport.memory_blob_store import MemoryBlobStore
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from anabranch.transport.object_blob_store import ObjectBlobStore
from anabranch.transport.redis_weight_channel import RedisWeightChannel
from anabranch.transport.weight_channel import WeightChannel
from anabranch.transport.weight_intact import first_broken
from anabranch.transport.weight_path import cheapest_path
from tests.contract.weight_worlds import chain, entry, publish, v


@dataclass
class Place:
    """A channel with e1.v0 (anchor of three chunks) to e1.v3, and a way to spoil what it holds."""

    channel: WeightChannel
    spoil: Callable[[str, bytes | None], object]  # None: the chunk goes

    @property
    def path(self):
        return cheapest_path(self.channel.index(), None, v(3))


ANCHOR = (b"first" * 100, b"second" * 100, b"third" * 100)


def filled(channel: WeightChannel, run: str) -> WeightChannel:
    publish(channel, run, "anchor", 0, payloads=ANCHOR)
    for version in (1, 2, 3):
        publish(channel, run, "delta", version)
    return channel


@pytest.fixture(params=["memory", "redis", "directory"])
def place(request, run_name, keys, tmp_path) -> Place:
    if request.param == "memory":
        store = MemoryWeightStore(run_name)
        held = store.blobs.chunks

        def in_memory(digest: str, content: bytes | None) -> None:
            held.pop(digest)
            if content is not None:
                held[digest] = content

        return Place(filled(MemoryWeightChannel(store), run_name), in_memory)
    client = request.getfixturevalue("client")
    if request.param == "redis":

        def in_redis(digest: str, content: bytes | None) -> None:
            client.unlink(keys.blob(digest)) if content is None else client.set(keys.blob(digest), content)

        return Place(filled(RedisWeightChannel(client, keys), run_name), in_redis)
    root = tmp_path / "chunks"

    def in_directory(digest: str, content: bytes | None) -> None:
        file = root / run_name / "blobs" / digest[:2] / digest
        file.unlink() if content is None else file.write_bytes(content)

    blobs = ObjectBlobStore(f"file://{root}", run_name)
    return Place(filled(RedisWeightChannel(client, keys, blobs=blobs), run_name), in_directory)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_whole_path_has_nothing_broken_and_all_of_it_was_read(place, threads):
    done: list[int] = []
    assert first_broken(place.channel, place.path, threads=threads, progress=done.append) is None
    assert sum(done) == sum(e.payload_bytes for e in place.path) > 0
    assert len(done) == sum(e.chunks for e in place.path) == 6


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("at", "number"), [(0, 1), (0, 2), (2, 0)])
def test_a_chunk_that_is_gone_or_altered_is_found(place, at, number, threads):
    path = place.path
    (manifest,) = place.channel.manifests([(path[at].policy, path[at].label)])
    chunk = manifest.chunks[number]
    content = place.channel.blobs.get(chunk.digest, chunk.size_bytes)
    place.spoil(chunk.digest, None)
    found = first_broken(place.channel, path, threads=threads)
    assert found is not None
    assert found[0] == path[at]
    assert f"chunk {chunk.digest[:16]} is not in" in found[1]
    place.channel.blobs.put(content)
    assert first_broken(place.channel, path, threads=threads) is None
    place.spoil(chunk.digest, content[:-1] + bytes([content[-1] ^ 1]))
    found = first_broken(place.channel, path, threads=threads)
    assert found is not None
    assert found[0] == path[at]
    assert "was altered" in found[1]


def test_the_first_one_along_the_path_is_named(place):
    path = place.path
    for at in (3, 1):
        (manifest,) = place.channel.manifests([(path[at].policy, path[at].label)])
        place.spoil(manifest.chunks[0].digest, None)
    found = first_broken(place.channel, path, threads=3)
    assert found is not None
    assert found[0] == path[1]


def test_a_manifest_that_followers_refuse_is_broken(place):
    def refuse(manifest):
        if manifest.version == 2:
            raise ManifestError("not signed")

    assert first_broken(place.channel, place.path, check=refuse) == (place.path[2], "not signed")


def test_nothing_is_nothing_broken(place):
    assert first_broken(place.channel, []) is None


@pytest.fixture
def stored(run_name) -> tuple[MemoryWeightStore, MemoryWeightChannel]:
    store = MemoryWeightStore(run_name)
    channel = MemoryWeightChannel(store)
    chain(channel, run_name, 2)
    return store, channel


@pytest.mark.parametrize(("harm", "reason"), [
    (lambda text: None, "its manifest is missing"),
    (lambda text: "{", "manifest"),
    (lambda text: text.replace('"run":"', '"run":"x', 1), "put there by somebody else"),
    (lambda text: text.replace('"size_bytes":', '"size_bytes":1', 1), "the index says something else"),
])  # fmt: skip
def test_a_manifest_that_is_gone_or_altered_is_found(stored, harm, reason):
    store, channel = stored
    path = cheapest_path(channel.index(), None, v(2))
    name = v(1), "delta"
    text = harm(store.manifests[name])
    if text is None:
        del store.manifests[name]
    else:
        store.manifests[name] = text
    found = first_broken(channel, path)
    assert found is not None
    assert found[0] == path[1]
    assert reason in found[1]


def test_manifests_that_do_not_follow_from_each_other_are_found(stored, run_name):
    _, channel = stored
    entries = channel.index()
    assert first_broken(channel, [entries[0], entries[2]]) == (
        entries[2], f"its base is not e1.v0 with digest {entries[0].digest}",
    )  # fmt: skip


def test_a_layout_that_is_gone_is_found(stored):
    store, channel = stored
    path = cheapest_path(channel.index(), None, v(2))
    store.layouts.clear()
    found = first_broken(channel, path)
    assert found is not None
    assert found[0] == path[0]
    assert "no layout" in found[1]


class Watched(MemoryBlobStore):
    """Counts chunks being read; all wait for each other, as far as so many come."""

    def __init__(self, at_once: int) -> None:
        super().__init__()
        self.barrier = threading.Barrier(at_once)
        self.lock = threading.Lock()
        self.inside = self.most = 0

    def get(self, digest: str, size_bytes: int) -> bytes:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.barrier.wait(10)
        with self.lock:
            self.inside -= 1
        return super().get(digest, size_bytes)


def test_so_many_chunks_are_read_at_once_and_no_more(run_name):
    blobs: BlobStore = (watched := Watched(3))
    channel = MemoryWeightChannel(MemoryWeightStore(run_name), blobs)
    manifest = publish(channel, run_name, "anchor", 0, payloads=tuple(bytes([n]) * 9 for n in range(12)))
    assert first_broken(channel, [entry(manifest)], threads=3) is None
    assert watched.most == 3


class Away(MemoryBlobStore):
    def get(self, digest: str, size_bytes: int) -> bytes:
        raise StreamUnavailableError("away")


def test_a_store_that_is_away_says_nothing_about_the_path(run_name):
    channel = MemoryWeightChannel(MemoryWeightStore(run_name), Away())
    manifest = publish(channel, run_name, "anchor", 0)
    with pytest.raises(StreamUnavailableError, match="away"):
        first_broken(channel, [entry(manifest)], threads=2)
