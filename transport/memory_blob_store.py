"""`BlobStore` in memory: the public twin of the others.

Invariant: that of `blob_store.py`. Held by tests/contract/test_blob_store.py, the same suite.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

from anabranch.transport.blob_store import BlobInfo, blob_digest, checked_blob


class MemoryBlobStore:
    """Args:
    clock_ms: gives chunks their age; a test may set it.
    """

    def __init__(self, *, clock_ms: Callable[[], float] = lambda: time.time() * 1000) -> None:
        self._clock_ms = clock_ms
        self._lock = threading.Lock()
        self.chunks: dict[str, bytes] = {}
        self._put_ms: dict[str, float] = {}

    def put(self, payload: bytes) -> str:
        digest = blob_digest(payload)
        with self._lock:
            self.chunks[digest] = bytes(payload)  # what is there may have been damaged
            self._put_ms[digest] = self._clock_ms()
        return digest

    def get(self, digest: str, size_bytes: int) -> bytes:
        return checked_blob(self.chunks.get(digest), digest, size_bytes, "memory")

    def delete(self, digests: Iterable[str]) -> None:
        with self._lock:
            for digest in digests:
                self.chunks.pop(digest, None)
                self._put_ms.pop(digest, None)

    def list(self) -> Iterator[BlobInfo]:
        with self._lock:
            now = self._clock_ms()
            ages = {d: (now - self._put_ms.get(d, now)) / 1000 for d in self.chunks}
            found = [BlobInfo(d, len(payload), ages[d]) for d, payload in self.chunks.items()]
        yield from found

    def close(self) -> None:
        """Nothing to close."""
