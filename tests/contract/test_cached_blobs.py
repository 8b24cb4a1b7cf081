"""A region's cache in front of an object store: each chunk is fetched once, and the cache is never in the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from anabranch.schemas.errors import DeltaError, StreamUnavailableError
from anabranch.transport import cached_blob_store
from anabranch.transport.cached_blob_store import CachedBlobStore
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.memory_blob_store import MemoryBlobStore
from anabranch.transport.redis_client import connect, open_client


class FarStore(MemoryBlobStore):
    """Counts what crosses the WAN."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.delay_s = 0.0
        self.fails = 0

    def get(self, digest: str, size_bytes: int) -> bytes:
        self.fetched.append(digest)
        time.sleep(self.delay_s)
        if self.fails:
            self.fails -= 1
            raise StreamUnavailableError("the far store is away")
        return super().get(digest, size_bytes)


@pytest.fixture
def far() -> FarStore:
    return FarStore()


@pytest.fixture
def producer(valkey, keys, far) -> Iterator:
    """Makes the store as one more producer process of the region has it."""
    made: list[CachedBlobStore] = []

    def make(budget_bytes: int = 10_000, **more) -> CachedBlobStore:
        made.append(CachedBlobStore(far, connect(valkey.url, deadline_s=10, what="r"), keys, budget_bytes, **more))
        return made[-1]

    yield make
    for store in made:
        store.close()


def held(client, keys) -> set[str]:
    prefix = keys.cached_blob("")
    return {key.decode().removeprefix(prefix) for key in client.scan_iter(f"{prefix}*")}


def test_a_chunk_crosses_once_for_all_producers(producer, far):
    digest = producer().put(b"weights")
    assert [producer().get(digest, 7) for _ in range(8)] == [b"weights"] * 8
    assert far.fetched == [digest]
    assert [info.digest for info in producer().list()] == [digest]


def test_producers_that_ask_at_once_wait_for_one_fetch(producer, far):
    far.delay_s = 0.3
    digests = [far.put(bytes([i]) * 100) for i in range(3)]
    got: list[bytes] = []
    stores = [producer() for _ in range(8)]

    def work(store) -> None:
        got.extend(store.get(digest, 100) for digest in digests)

    threads = [threading.Thread(target=work, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(got) == 24
    assert sorted(far.fetched) == sorted(digests)


def test_one_that_dies_while_fetching_holds_the_others_up_no_longer_than_its_deadline(producer, far, client, keys):
    digest = far.put(b"weights")
    client.set(keys.cache_fetch(digest), "dead", px=600_000)
    started = time.monotonic()
    assert producer(fetch_deadline_s=0.3).get(digest, 7) == b"weights"
    assert 0.25 < time.monotonic() - started < 10
    assert producer().get(digest, 7) == b"weights"
    assert len(far.fetched) == 1
    assert client.get(keys.cache_fetch(digest)) == b"dead", "it was not ours to release"


def test_one_whose_fetch_fails_leaves_it_to_the_next_at_once(producer, far, client, keys):
    digest = far.put(b"weights")
    far.fails = 1
    with pytest.raises(StreamUnavailableError, match="the far store is away"):
        producer().get(digest, 7)
    assert client.exists(keys.cache_fetch(digest)) == 0
    assert producer().get(digest, 7) == b"weights"
    with pytest.raises(DeltaError, match="is not in"):
        producer().get("f" * 64, 7)


@pytest.mark.parametrize("spoilt", [b"weighty", b"weight", b""])
def test_a_damaged_chunk_in_the_cache_is_fetched_again(producer, far, client, keys, spoilt):
    digest = far.put(b"weights")
    producer().get(digest, 7)
    client.set(keys.cached_blob(digest), spoilt)
    assert producer().get(digest, 7) == b"weights"
    assert len(far.fetched) == 2
    assert client.get(keys.cached_blob(digest)) == b"weights"
    assert client.hget(keys.cache_sizes, "total") == b"7"


def test_the_cache_keeps_to_its_budget_and_drops_what_was_not_used(producer, far, client, keys):
    store = producer(budget_bytes=1000)
    digests = [far.put(bytes([i]) * 300) for i in range(4)]
    for digest in digests[:3]:
        store.get(digest, 300)
        time.sleep(0.005)  # use times are in milliseconds
    store.get(digests[0], 300)
    time.sleep(0.005)
    store.get(digests[3], 300)
    assert held(client, keys) == {digests[0], digests[2], digests[3]}
    big = far.put(b"x" * 1001)
    assert store.get(big, 1001) == b"x" * 1001
    assert held(client, keys) == {digests[0], digests[2], digests[3]}
    half = far.put(b"y" * 999)
    store.get(half, 999)
    assert held(client, keys) == {half}
    assert client.hgetall(keys.cache_sizes) == {half.encode(): b"999", b"total": b"999"}
    assert client.zcard(keys.cache_used) == 1
    client.delete(keys.cache_used)  # as a person may, who clears up
    store.get(digests[0], 300)
    assert client.hget(keys.cache_sizes, "total") == b"300"


def test_a_cache_that_is_away_full_or_gone_is_done_without(tmp_path, keys, far, monkeypatch):
    digest, other = far.put(b"weights"), far.put(b"x" * 300_000)
    with EmbeddedValkey(tmp_path / "v", maxmemory_bytes=64 * 2**20, fsync="everysec") as server:
        store = CachedBlobStore(far, open_client(server.url, deadline_s=1, what="r"), keys, 2**20)
        client = connect(server.url, deadline_s=10, what="r")
        assert [store.get(digest, 7) for _ in range(3)] == [b"weights"] * 3
        client.config_set("maxmemory", 1)
        assert store.get(other, 300_000) == b"x" * 300_000
        client.config_set("maxmemory", 64 * 2**20)
        assert store.get(digest, 7) == b"weights", "left alone for a while"
        assert len(far.fetched) == 3
        monkeypatch.setattr(cached_blob_store, "REST_S", 0.0)
        store._rests_until = 0.0
        assert store.get(digest, 7) == b"weights", "used again"
        assert len(far.fetched) == 3
        server.kill()
        started = time.monotonic()
        assert store.get(digest, 7) == b"weights"
        assert time.monotonic() - started < 10
        store.close()
        client.close()
