"""`BlobStore` over plain Redis keys: for models whose weights the hub can hold.

Invariant: that of `blob_store.py`. A chunk that no manifest names expires `UNCOMMITTED_TTL_MS` after it was last put, also
when those that named it are dropped between the put and the commit; the commit of a manifest takes the expiry away. Reads
need no more than a replica.
Held by tests/contract/test_blob_store.py and tests/contract/test_weight_channel.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TypeVar

import redis

from anabranch.schemas.errors import BackpressureError
from anabranch.schemas.keys import Keys
from anabranch.transport import scripts
from anabranch.transport.blob_store import BlobInfo, blob_digest, checked_blob
from anabranch.transport.outage import Outage
from anabranch.transport.redis_client import Guard

UNCOMMITTED_TTL_MS = 6 * 3600 * 1000  # chunks whose learner died before the commit
_BATCH = 1000  # keys in one command
T = TypeVar("T")


class RedisBlobStore:
    """Chunks of one run; closing it leaves the client to its owner."""

    def __init__(self, client: redis.Redis, keys: Keys, *, what: str = "the hub") -> None:
        self._client = client
        self._keys = keys
        self._what = what
        self._guard = Guard(client, what)
        self._outage = Outage()
        self._put_again = scripts.load(client, "weights_put_again")

    def put(self, payload: bytes) -> str:
        return self._outage.watch(lambda: self._put(payload))

    def _put(self, payload: bytes) -> str:
        digest = blob_digest(payload)
        key = self._keys.blob(digest)

        def call() -> bool:
            if self._client.set(key, payload, nx=True, px=UNCOMMITTED_TTL_MS):
                return True
            keys = [key, self._keys.garbage]
            return bool(self._put_again(keys=keys, args=[digest, payload, UNCOMMITTED_TTL_MS]))  # 0: it went just now

        for _ in range(3):
            if self._guard.repeat(call):
                return digest
        raise BackpressureError(f"{self._what} does not keep chunk {digest[:16]}: it is gone as soon as it is written")

    def get(self, digest: str, size_bytes: int) -> bytes:
        payload = self._guard.repeat(lambda: self._client.get(self._keys.blob(digest)))
        return checked_blob(payload, digest, size_bytes, self._what)

    def delete(self, digests: Iterable[str]) -> None:
        for batch in batched(map(self._keys.blob, digests), _BATCH):
            self._guard.repeat(partial(self._client.unlink, *batch))

    def list(self) -> Iterator[BlobInfo]:
        """Ages are lower bounds: Redis knows when a chunk that expires was put, else only when it was last touched."""
        prefix = self._keys.blob("")
        cursor = 0
        while True:
            scan = partial(self._client.scan, cursor, match=_literal(prefix) + "*", count=_BATCH)
            cursor, names = self._guard.repeat(scan)
            for batch in batched(names, _BATCH):
                yield from self._describe([name.decode() for name in batch], prefix)
            if cursor == 0:
                return

    def _describe(self, names: Sequence[str], prefix: str) -> Iterator[BlobInfo]:
        def call() -> Sequence[object]:
            pipe = self._client.pipeline(transaction=False)
            for name in names:
                pipe.strlen(name).pttl(name).object("idletime", name)
            answers: Sequence[object] = pipe.execute(raise_on_error=False)
            return answers

        answers = self._guard.repeat(call)
        for i, name in enumerate(names):
            size, left_ms, idle_s = answers[3 * i : 3 * i + 3]
            if not isinstance(size, int) or not isinstance(left_ms, int) or left_ms == -2:
                continue  # gone since the scan
            age_s = (UNCOMMITTED_TTL_MS - left_ms) / 1000 if left_ms >= 0 else idle_s
            yield BlobInfo(name.removeprefix(prefix), size, float(age_s) if isinstance(age_s, int | float) else 0.0)

    def close(self) -> None:
        """Nothing of its own to close."""


def batched(items: Iterable[T], count: int) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, count)):
        yield batch


def _literal(text: str) -> str:
    """`text` as a glob pattern that matches only itself."""
    return "".join(f"\\{c}" if c in r"\*?[]^-" else c for c in text)
