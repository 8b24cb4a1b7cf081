"""`BlobStore` in an object store (S3, GCS, Azure) or a directory.

Invariant: that of `blob_store.py`, and of `object_store.py`. Objects are RUN/blobs/AB/ABCD... under the path of the URL.
Held by tests/contract/test_blob_store.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping

from anabranch.schemas.config import ChannelSection
from anabranch.schemas.errors import DeltaError
from anabranch.transport.blob_store import BlobInfo, blob_digest, checked_blob
from anabranch.transport.object_store import DEADLINE_S, ObjectStore, Place, WrongSizeError
from anabranch.transport.outage import Outage

_NAME = re.compile(r"blobs/[0-9a-f]{2}/([0-9a-f]{64})\Z")
_PLACE = Place("the blob store", "channel.blobs", "channel.retain_bytes")


class ObjectBlobStore:
    """Chunks of one run. Arguments and what it raises: as `ObjectStore`."""

    def __init__(
        self, url: str, run: str, *, options: Mapping[str, str] | None = None, deadline_s: float = DEADLINE_S
    ) -> None:
        self._run = run
        self._outage = Outage()
        self._objects = ObjectStore(url, _PLACE, options=options, deadline_s=deadline_s, aside=f"{run}/aside")

    def put(self, payload: bytes) -> str:
        digest = blob_digest(payload)
        self._outage.watch(lambda: self._objects.put(self._path(digest), payload))
        return digest

    def get(self, digest: str, size_bytes: int) -> bytes:
        where = self._objects.where
        try:
            payload = self._objects.get(self._path(digest), size_bytes=size_bytes)
        except WrongSizeError as error:
            raise DeltaError(f"chunk {digest[:16]} in {where} was altered: {error}") from None
        return checked_blob(payload, digest, size_bytes, where)

    def delete(self, digests: Iterable[str]) -> None:
        self._objects.delete([self._path(digest) for digest in digests])

    def list(self) -> Iterator[BlobInfo]:
        """Ages are by this machine's clock against the store's time stamps."""
        for stored in self._objects.list(f"{self._run}/blobs"):
            if match := _NAME.search(stored.path):
                yield BlobInfo(match[1], stored.bytes, max(0.0, time.time() - stored.changed_s))

    def close(self) -> None:
        """Nothing to close: connections go with the object."""

    def _path(self, digest: str) -> str:
        return f"{self._run}/blobs/{digest[:2]}/{digest}"


def open_blob_store(config: ChannelSection, run: str) -> ObjectBlobStore | None:
    """The store that `channel.blobs` names, None when chunks are kept in the hub's Redis. Raises ConfigError."""
    if config.blobs == "redis":
        return None
    return ObjectBlobStore(config.blobs, run, options=config.blob_options)
