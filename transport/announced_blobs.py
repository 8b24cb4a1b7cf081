"""A blob store outside of Redis as the channel uses it: the hub hears of every chunk before it is stored.

Invariant: from before a chunk is put until `UNCOMMITTED_TTL_MS` later, or until a manifest names it, the hub's garbage
list holds it, not due yet. So no collector deletes a chunk between its `put` and its commit, even one that had been
garbage before; and a chunk whose learner dies before the commit is found and collected.
Held by tests/contract/test_weight_channel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from anabranch.transport.blob_store import BlobInfo, BlobStore, blob_digest
from anabranch.transport.retry import wait_until

CLAIM_MS = 120_000  # a collector deletes what it has claimed within half of this, or lets it be
GRACE_MS = 10 * 60_000  # from the drop of the last manifest that names a chunk until it may be deleted


class AnnouncedBlobs:
    """Args:
    announce: tells the hub of a digest; False while a collector is deleting that very chunk.
    """

    def __init__(self, inner: BlobStore, announce: Callable[[str], bool]) -> None:
        self.inner = inner
        self._announce = announce

    def put(self, payload: bytes) -> str:
        """Raises DeadlineError too: a collector claimed this chunk and has not said that it is done."""
        digest = blob_digest(payload)
        wait_until(
            lambda: self._announce(digest),
            deadline_s=2 * CLAIM_MS / 1000,
            what=f"the collector of garbage to be done with chunk {digest[:16]}",
        )
        return self.inner.put(payload)

    def get(self, digest: str, size_bytes: int) -> bytes:
        return self.inner.get(digest, size_bytes)

    def delete(self, digests: Iterable[str]) -> None:
        self.inner.delete(digests)

    def list(self) -> Iterator[BlobInfo]:
        return self.inner.list()

    def close(self) -> None:
        self.inner.close()
