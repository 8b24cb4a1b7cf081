"""Fetching: order, retries of a chunk alone, what is kept of a failed attempt, and bounded look-ahead."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest

from anabranch.producers.fetcher import PATIENCE_TRIES, TRIES, Fetcher
from anabranch.schemas.errors import DeltaError, StreamUnavailableError
from anabranch.schemas.manifest import Base, Chunk, Manifest
from anabranch.transport.blob_store import blob_digest
from anabranch.transport.memory_blob_store import MemoryBlobStore


class Store(MemoryBlobStore):
    """Counts what is asked for; `before` may refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        self.before: Callable[[str, int], None] = lambda digest, times: None

    def get(self, digest: str, size_bytes: int) -> bytes:
        self.asked[digest] += 1
        self.before(digest, self.asked[digest])
        return super().get(digest, size_bytes)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.producers.fetcher.backoff_s", lambda *_, **__: 0.0)


def manifest(store: Store, version: int, payloads: list[bytes]) -> Manifest:
    return Manifest(
        kind="delta",
        run="r",
        epoch=1,
        version=version,
        base=Base(epoch=1, version=version - 1, digest="0" * 32),
        result_digest="0" * 32,
        layout_hash="0" * 32,
        codec="x",
        chunks=tuple(Chunk(digest=store.put(p), size_bytes=len(p)) for p in payloads),
        full_bytes=0,
        changed_elements=0,
        total_elements=0,
        learner_step=0,
        fork_version=0,
        published_ms=0,
    )


def path_of(store: Store, versions: int, chunks: int = 3, size: int = 10) -> list[Manifest]:
    return [manifest(store, v, [bytes([v, c]) * (size // 2) for c in range(chunks)]) for v in range(1, versions + 1)]


@pytest.mark.parametrize("threads", [1, 4])
def test_chunks_come_in_order_each_fetched_once(store: Store, threads: int) -> None:
    manifests = path_of(store, 5)
    fetcher = Fetcher(store, threads)
    got = list(fetcher.in_order(manifests))
    assert [m for m, _ in got] == manifests
    assert [[blob_digest(c) for c in chunks] for _, chunks in got] == [[c.digest for c in m.chunks] for m in manifests]
    assert set(store.asked.values()) == {1}
    assert fetcher.fetched_bytes == 150
    fetcher.close()


def test_a_bad_chunk_is_fetched_again_alone(store: Store) -> None:
    (one,) = path_of(store, 1)
    bad = one.chunks[1].digest

    def altered_once(digest: str, times: int) -> None:
        if digest == bad and times == 1:
            raise DeltaError("altered")

    store.before = altered_once
    fetcher = Fetcher(store, 2)
    assert len(next(fetcher.in_order([one]))[1]) == 3
    assert sorted(store.asked.values()) == [1, 1, 2]
    fetcher.close()


def test_a_chunk_that_stays_bad_is_given_up_and_the_good_ones_are_kept_for_the_next_attempt(store: Store) -> None:
    (one,) = path_of(store, 1, chunks=5)
    bad = one.chunks[4].digest
    good = store.chunks.pop(bad)
    fetcher = Fetcher(store, 2)
    with pytest.raises(DeltaError, match="is not in memory"):
        list(fetcher.in_order([one]))
    assert store.asked[bad] == TRIES
    store.put(good)
    assert len(next(fetcher.in_order([one]))[1]) == 5
    assert store.asked[bad] == TRIES + 1
    assert all(store.asked[c.digest] == 1 for c in one.chunks[:4])
    fetcher.close()


def test_what_is_before_a_broken_manifest_still_comes(store: Store) -> None:
    manifests = path_of(store, 3)
    del store.chunks[manifests[2].chunks[0].digest]
    fetcher = Fetcher(store, 4)
    coming = fetcher.in_order(manifests)
    assert [next(coming)[0].version, next(coming)[0].version] == [1, 2]
    with pytest.raises(DeltaError):
        next(coming)
    fetcher.close()


def test_a_store_that_is_away_is_asked_for_a_while(store: Store) -> None:
    (one,) = path_of(store, 1, chunks=1)

    def away(digest: str, times: int) -> None:
        if times < PATIENCE_TRIES:
            raise StreamUnavailableError("gone")

    store.before = away
    fetcher = Fetcher(store, 1)
    assert len(list(fetcher.in_order([one]))) == 1
    store.before = lambda digest, times: (_ for _ in ()).throw(StreamUnavailableError("gone"))
    with pytest.raises(StreamUnavailableError, match="gone"):
        list(fetcher.in_order([one]))
    fetcher.close()


def test_it_looks_ahead_as_far_as_its_bytes_go_and_no_further(store: Store) -> None:
    manifests = path_of(store, 10, chunks=1, size=100)
    fetcher = Fetcher(store, 4, ahead_bytes=350)
    coming = fetcher.in_order(manifests)
    next(coming)
    fetcher._pool.submit(lambda: None).result(timeout=10)
    for future in [fetcher._pool.submit(threading.get_ident) for _ in range(8)]:
        future.result(timeout=10)
    assert sum(store.asked.values()) <= 3
    assert len(list(coming)) == 9
    fetcher.close()


def test_one_manifest_may_be_larger_than_what_it_looks_ahead(store: Store) -> None:
    fetcher = Fetcher(store, 2, ahead_bytes=10)
    assert len(list(fetcher.in_order(path_of(store, 3, size=100)))) == 3
    fetcher.close()


def test_a_stop_ends_it(store: Store) -> None:
    stop = threading.Event()
    fetcher = Fetcher(store, 1, stop=stop)
    stop.set()
    with pytest.raises(StreamUnavailableError, match="the producer ends"):
        list(fetcher.in_order(path_of(store, 1)))
    fetcher.close()


# What stays broken


def test_a_try_after_a_broken_chunk_costs_that_chunk_alone(store: Store) -> None:
    manifests = path_of(store, 5, chunks=4)
    bad = manifests[0].chunks[2].digest
    good = store.chunks.pop(bad)
    fetcher = Fetcher(store, 2)
    with pytest.raises(DeltaError):
        list(fetcher.in_order(manifests))
    first = Counter(store.asked)
    for times in range(1, 6):
        with pytest.raises(DeltaError):
            list(fetcher.in_order(manifests))
        assert store.asked - first == Counter({bad: times}), "asked for once, and nothing beside it"
    store.put(good)
    assert [m for m, _ in fetcher.in_order(manifests)] == manifests
    assert all(store.asked[c.digest] == 1 for m in manifests for c in m.chunks if c.digest != bad)
    fetcher.close()


def test_nothing_behind_a_manifest_known_to_be_broken_is_fetched_before_it(store: Store) -> None:
    manifests = path_of(store, 4)
    bad = manifests[1].chunks[0].digest
    good = store.chunks.pop(bad)
    fetcher = Fetcher(store, 4, ahead_bytes=10)
    with pytest.raises(DeltaError):
        list(fetcher.in_order(manifests))
    store.asked.clear()
    with pytest.raises(DeltaError):
        list(fetcher.in_order(manifests))
    assert set(store.asked) <= {c.digest for m in manifests[:2] for c in m.chunks}
    store.put(good)
    assert [m for m, _ in fetcher.in_order(manifests)] == manifests
    fetcher.close()


def test_what_is_kept_is_one_manifest_and_as_much_as_it_looks_ahead(store: Store) -> None:
    manifests = path_of(store, 10, chunks=2, size=100)
    bad = manifests[0].chunks[1].digest
    del store.chunks[bad]
    fetcher = Fetcher(store, 4, ahead_bytes=450)
    for path in (manifests, manifests[3:], manifests[5:]):
        del store.chunks[path[0].chunks[0].digest]
        with pytest.raises(DeltaError):
            list(fetcher.in_order(path))
        assert 0 < sum(map(len, fetcher._kept.values())) <= 450 + path[0].payload_bytes
    fetcher.keep_little()
    assert sum(map(len, fetcher._kept.values())) <= 450
    assert len(list(fetcher.in_order(path_of(store, 2, size=60)))) == 2
    assert not fetcher._kept, "a path that was fetched to its end needs nothing more"
    fetcher.close()
