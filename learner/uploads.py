"""Puts chunks into the blob store from threads of their own, each again and again until a deadline.

Invariant: a `Chunk` is handed out only when its bytes are stored. Held by tests/unit/learner/test_weight_publisher.py.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from anabranch.schemas.manifest import Chunk
from anabranch.transport.blob_store import BlobStore
from anabranch.transport.retry import retry_until


class Uploads:
    """Args:
    stopping: set when nobody wants the chunks any more: no further attempts then.
    """

    def __init__(
        self, blobs: BlobStore, threads: int, *, deadline_s: float, stopping: threading.Event, name: str = "upload"
    ) -> None:
        self._blobs, self._deadline_s, self._stopping = blobs, deadline_s, stopping
        self._at_once = 2 * threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    def put(self, payload: bytes) -> Future[Chunk]:
        """Its result raises DeadlineError when the store could not be reached, or was full, for that long."""
        return self._pool.submit(self._put, payload)

    def put_all(self, payloads: Iterable[bytes]) -> list[Chunk]:
        """All of `payloads`, in order, with few in memory at a time. Raises as `put`."""
        waiting: deque[Future[Chunk]] = deque()
        chunks: list[Chunk] = []
        for payload in payloads:
            waiting.append(self.put(payload))
            if len(waiting) > self._at_once:
                chunks.append(waiting.popleft().result())
        return chunks + [future.result() for future in waiting]

    def _put(self, payload: bytes) -> Chunk:
        digest = retry_until(
            lambda: self._blobs.put(payload),
            deadline_s=self._deadline_s,
            what=f"the blob store, to keep a chunk of {len(payload)} bytes",
            sleep=self._stopping.wait,
            should_stop=self._stopping.is_set,
        )
        return Chunk(digest=digest, size_bytes=len(payload))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
