"""A region's Redis in front of an object store: each chunk crosses the WAN once for all producers of the region.

Invariant: what `get` returns matches its name, wherever it came from; a damaged chunk in the cache is fetched again. The
cache never holds more than its budget, and never stands in the way: when it is away, full or slow, chunks come from the
store itself. Held by tests/contract/test_blob_store.py.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import redis
import structlog

from anabranch.schemas.errors import AnabranchError, DeltaError
from anabranch.schemas.keys import Keys
from anabranch.transport import scripts
from anabranch.transport.blob_store import BlobInfo, BlobStore, checked_blob
from anabranch.transport.redis_client import Guard

T = TypeVar("T")

FETCH_DEADLINE_S = 30.0  # how long somebody else's fetch of the same chunk is waited for
REST_S = 30.0  # how long a cache that failed is left alone
_POLL_S = 0.02


class CachedBlobStore:
    """`put`, `delete` and `list` go to `inner`.

    Args:
        cache: client of the region's Redis, closed with this store.
        budget_bytes: of chunks in the cache, for the run.
    """

    def __init__(
        self,
        inner: BlobStore,
        cache: redis.Redis,
        keys: Keys,
        budget_bytes: int,
        *,
        what: str = "the weight cache",
        fetch_deadline_s: float = FETCH_DEADLINE_S,
    ) -> None:
        self._inner = inner
        self._cache = cache
        self._keys = keys
        self._budget_bytes = budget_bytes
        self._what = what
        self._fetch_deadline_s = fetch_deadline_s
        self._guard = Guard(cache, what)
        self._keep = scripts.load(cache, "weights_cache_put")
        self._release = scripts.load(cache, "weights_cache_release")
        self._rests_until = 0.0  # written by several threads; a lost update costs one more attempt

    def put(self, payload: bytes) -> str:
        return self._inner.put(payload)

    def get(self, digest: str, size_bytes: int) -> bytes:
        end = time.monotonic() + self._fetch_deadline_s
        caller = secrets.token_hex(8)
        while True:
            if (cached := self._cached(digest, size_bytes)) is not None:
                return cached
            first = self._try(lambda: self._begin_fetch(digest, caller))
            if first or first is None or time.monotonic() >= end:
                break  # ours to fetch, or no cache to wait for, or whoever fetches it takes too long
            time.sleep(_POLL_S)
        try:
            # Whoever had it before us may have finished between our look and our turn.
            if first and (cached := self._cached(digest, size_bytes)) is not None:
                return cached
            payload = self._inner.get(digest, size_bytes)
            self._try(lambda: self._store(digest, payload))
            return payload
        finally:
            if first:
                self._try(lambda: self._release(keys=[self._keys.cache_fetch(digest)], args=[caller]))

    def delete(self, digests: Iterable[str]) -> None:
        self._inner.delete(digests)

    def list(self) -> Iterator[BlobInfo]:
        return self._inner.list()

    def close(self) -> None:
        self._cache.close()
        self._inner.close()

    def _cached(self, digest: str, size_bytes: int) -> bytes | None:
        payload: bytes | None = self._try(lambda: self._cache.get(self._keys.cached_blob(digest)))
        if payload is None:
            return None
        try:
            checked_blob(payload, digest, size_bytes, self._what)
        except DeltaError as error:
            structlog.get_logger().warning("damaged chunk in the cache; fetching it again", error=str(error))
            self._try(lambda: self._cache.unlink(self._keys.cached_blob(digest)))
            return None
        now_ms = int(time.time() * 1000)
        self._try(lambda: self._cache.zadd(self._keys.cache_used, {digest: now_ms}, xx=True, gt=True))
        return payload

    def _begin_fetch(self, digest: str, caller: str) -> bool:
        lease_ms = int(self._fetch_deadline_s * 1000)
        return bool(self._cache.set(self._keys.cache_fetch(digest), caller, nx=True, px=lease_ms))

    def _store(self, digest: str, payload: bytes) -> object:
        keys = [self._keys.cached_blob(digest), self._keys.cache_used, self._keys.cache_sizes]
        return self._keep(keys=keys, args=[digest, payload, self._budget_bytes, self._keys.cached_blob("")])

    def _try(self, call: Callable[[], T]) -> T | None:
        """`call()` to the cache, None if the cache cannot do it."""
        if time.monotonic() < self._rests_until:
            return None
        try:
            return self._guard.once(call)
        except AnabranchError as error:
            self._rests_until = time.monotonic() + REST_S
            structlog.get_logger().warning(
                "the weight cache fails; chunks come from the store itself", error=str(error), for_s=REST_S
            )
            return None
