"""Fetches the chunks of a path of manifests, several at once and ahead of whoever decodes them.

Invariant: chunks come out in the order of the manifests, each as its manifest names it; what is fetched ahead is bounded in
bytes; a chunk that is missing or altered is fetched again alone before its manifest is given up, and one that cannot be
reached is asked for again for a while. Held by tests/unit/producers/test_fetcher.py.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from anabranch.schemas.errors import DeltaError, StreamUnavailableError
from anabranch.schemas.manifest import Chunk, Manifest
from anabranch.transport.blob_store import BlobStore
from anabranch.transport.retry import backoff_s

AHEAD_BYTES = 64 * 2**20
TRIES = 3  # of a chunk that is missing or altered
PATIENCE_TRIES = 6  # of a chunk whose store cannot be reached: about 5 s beside what the store itself waits


class Fetcher:
    """`on_chunk` is called, on any thread, after every chunk."""

    def __init__(
        self,
        blobs: BlobStore,
        threads: int,
        *,
        stop: threading.Event | None = None,
        on_chunk: Callable[[], None] = lambda: None,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        self._blobs, self._on_chunk, self._ahead_bytes = blobs, on_chunk, ahead_bytes
        self._stop = stop or threading.Event()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fetch")
        self._lock = threading.Lock()
        self._kept: dict[str, bytes] = {}  # of a manifest whose fetch failed: its good chunks, for the next attempt
        self.fetched_bytes = 0

    def in_order(self, manifests: Iterable[Manifest]) -> Generator[tuple[Manifest, list[bytes]], None, None]:
        """Each manifest with its chunks.

        Raises, in the turn of the manifest that it concerns:
            DeltaError: a chunk is missing or altered, also after several tries.
            StreamUnavailableError: the store cannot be reached, or this fetcher is being stopped.
        """
        waiting: deque[tuple[Manifest, list[Future[bytes]]]] = deque()
        ahead = 0
        left = iter(manifests)
        following = next(left, None)
        try:
            while following is not None or waiting:
                while following is not None and (not waiting or ahead + following.payload_bytes <= self._ahead_bytes):
                    waiting.append((following, [self._pool.submit(self._fetch, c) for c in following.chunks]))
                    ahead += following.payload_bytes
                    following = next(left, None)
                manifest, futures = waiting[0]
                chunks = [future.result() for future in futures]
                waiting.popleft()
                self._kept.clear()
                ahead -= manifest.payload_bytes
                yield manifest, chunks
                del manifest, futures, chunks  # or they would be held until the next ones are there
        finally:
            for _, futures in waiting:
                for future in futures:
                    future.cancel()
            wait([future for _, futures in waiting for future in futures])
            if waiting:
                manifest, futures = waiting[0]
                done = [(c, f) for c, f in zip(manifest.chunks, futures, strict=True) if not f.cancelled()]
                self._kept = {c.digest: f.result() for c, f in done if f.exception() is None}

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def _fetch(self, chunk: Chunk) -> bytes:
        kept = self._kept.get(chunk.digest)
        if kept is not None:
            return kept
        bad = away = 0
        while True:
            if self._stop.is_set():
                raise StreamUnavailableError("the producer ends; weights are fetched no more")
            try:
                payload = self._blobs.get(chunk.digest, chunk.size_bytes)
            except DeltaError:
                bad += 1
                if bad >= TRIES:
                    raise
            except StreamUnavailableError:
                away += 1
                if away >= PATIENCE_TRIES:
                    raise
            else:
                with self._lock:
                    self.fetched_bytes += len(payload)
                self._on_chunk()
                return payload
            self._stop.wait(backoff_s(bad + away - 1, base_s=0.1))
