"""Fetches the chunks of a path of manifests, several at once and ahead of whoever decodes them.

Invariant: chunks come out in the order of the manifests, each as its manifest names it; what is fetched ahead is bounded in
bytes; a chunk that is missing or altered is fetched again alone before its manifest is given up, and one that cannot be
reached is asked for again for a while. When a path fails, its good chunks are kept for the next try: one manifest's and what
was fetched ahead. A chunk that was bad is tried first then, and once: a try that fails again costs it alone. Held by
tests/unit/producers/test_fetcher.py.
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
_Coming = tuple[Manifest, list[Future[bytes]]]


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
        self._kept: dict[str, bytes] = {}  # good chunks of a path that failed, for the next try
        self._suspects: set[str] = set()  # chunks that stayed bad
        self.fetched_bytes = 0

    def in_order(self, manifests: Iterable[Manifest]) -> Generator[tuple[Manifest, list[bytes]], None, None]:
        """Each manifest with its chunks.

        Raises, in the turn of the manifest that it concerns:
            DeltaError: a chunk is missing or altered, also after several tries.
            StreamUnavailableError: the store cannot be reached, or this fetcher is being stopped.
        """
        waiting: deque[_Coming] = deque()
        ahead = 0
        left = iter(manifests)
        following = next(left, None)
        try:
            if following is not None:
                self._trim(following)
            while following is not None or waiting:
                while following is not None and (not waiting or self._goes_along(following, ahead)):
                    if not waiting:
                        self._try_suspects(following)
                    waiting.append((following, [self._pool.submit(self._fetch, c) for c in following.chunks]))
                    ahead += following.payload_bytes
                    following = next(left, None)
                manifest, futures = waiting[0]
                chunks = [future.result() for future in futures]
                waiting.popleft()
                for chunk in manifest.chunks:
                    self._kept.pop(chunk.digest, None)
                ahead -= manifest.payload_bytes
                yield manifest, chunks
                del manifest, futures, chunks  # or they would be held until the next ones are there
        finally:
            for _, futures in waiting:
                for future in futures:
                    future.cancel()
            wait([future for _, futures in waiting for future in futures])
            if waiting:
                self._kept = _good(waiting) | self._kept
                self._trim(waiting[0][0])
            elif following is None:
                self.forget()

    def forget(self) -> None:
        """What was kept: nobody tries this again. Between two calls of `in_order`, as `keep_little`."""
        self._kept.clear()
        self._suspects.clear()

    def keep_little(self) -> None:
        """Of what was kept, no more than may be fetched ahead: another process tries next."""
        self._trim(None)

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def _goes_along(self, manifest: Manifest, ahead: int) -> bool:
        """May it be fetched while another one is waited for? One that was broken is tried in its turn."""
        within = ahead + manifest.payload_bytes <= self._ahead_bytes
        return within and self._suspects.isdisjoint(c.digest for c in manifest.chunks)

    def _try_suspects(self, manifest: Manifest) -> None:
        """Before anything else of this manifest. Raises as `in_order`."""
        for chunk in manifest.chunks:
            if chunk.digest in self._suspects:
                self._kept[chunk.digest] = self._fetch(chunk, tries=1)

    def _trim(self, manifest: Manifest | None) -> None:
        """Keep all of `manifest`, which is fetched next, and of others what may be fetched ahead."""
        whole, room = {c.digest for c in manifest.chunks} if manifest else set(), self._ahead_bytes
        kept: dict[str, bytes] = {}
        for digest, payload in self._kept.items():
            if digest in whole or len(payload) <= room:
                kept[digest] = payload
                room -= 0 if digest in whole else len(payload)
        self._kept = kept

    def _fetch(self, chunk: Chunk, tries: int = TRIES) -> bytes:
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
                if bad >= tries:
                    with self._lock:
                        self._suspects.add(chunk.digest)
                    raise
            except StreamUnavailableError:
                away += 1
                if away >= PATIENCE_TRIES:
                    raise
            else:
                with self._lock:
                    self.fetched_bytes += len(payload)
                    self._suspects.discard(chunk.digest)
                self._on_chunk()
                return payload
            self._stop.wait(backoff_s(bad + away - 1, base_s=0.1))


def _good(coming: Iterable[_Coming]) -> dict[str, bytes]:
    """What has come of it, in order."""
    done = [(c, f) for m, futures in coming for c, f in zip(m.chunks, futures, strict=True) if not f.cancelled()]
    return {c.digest: f.result() for c, f in done if f.exception() is None}
