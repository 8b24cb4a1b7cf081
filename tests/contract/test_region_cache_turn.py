"""A chunk that somebody else fetched into the region's cache in the moment before our turn is not fetched again."""

from __future__ import annotations

import pytest
import redis

from anabranch.schemas.keys import Keys
from anabranch.transport.blob_store import blob_digest
from anabranch.transport.cached_blob_store import CachedBlobStore

CHUNK = b"chunk" * 100


class Counted:
    """A store that counts what is fetched from it."""

    def __init__(self) -> None:
        self.fetched = 0

    def get(self, digest: str, size_bytes: int) -> bytes:
        self.fetched += 1
        return CHUNK


def test_who_gets_the_turn_looks_again(client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = blob_digest(CHUNK)
    ours, theirs = Counted(), Counted()
    other = CachedBlobStore(theirs, client, keys, 10**6)  # type: ignore[arg-type]
    store = CachedBlobStore(ours, client, keys, 10**6)  # type: ignore[arg-type]
    take_turn = store._begin_fetch

    def take_turn_late(digest: str, caller: str) -> bool:
        other.get(digest, len(CHUNK))  # begins, stores and ends between our look and our turn
        return take_turn(digest, caller)

    monkeypatch.setattr(store, "_begin_fetch", take_turn_late)
    assert store.get(digest, len(CHUNK)) == CHUNK
    assert (theirs.fetched, ours.fetched) == (1, 0)
    assert client.get(keys.cache_fetch(digest)) is None  # our turn has ended
