"""Where weight chunks are kept, as a protocol: Redis keys, an object store, a region's cache, or memory.

Invariant: a chunk is immutable and named by the BLAKE3-256 of its bytes; `get` hands out only bytes that match their
name. `put` of the same bytes again is harmless and restores a damaged chunk.
Held by tests/contract/test_blob_store.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from blake3 import blake3

from anabranch.schemas.errors import DeltaError


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """`age_s`: seconds since it was last put, by the store's clock."""

    digest: str
    size_bytes: int
    age_s: float


class BlobStore(Protocol):
    """All methods may be called from several threads at once. They raise StreamUnavailableError when the store cannot be
    reached, BackpressureError when it is full, ConfigError when it refuses the credentials."""

    def put(self, payload: bytes) -> str:
        """Store a chunk durably; returns its digest."""
        ...

    def get(self, digest: str, size_bytes: int) -> bytes:
        """The chunk, verified. Raises DeltaError if it is missing, of another size, or altered."""
        ...

    def delete(self, digests: Iterable[str]) -> None:
        """Forget chunks; one that is not there is no error."""
        ...

    def list(self) -> Iterator[BlobInfo]:
        """Every chunk of this run in the store."""
        ...

    def close(self) -> None: ...


def blob_digest(payload: bytes) -> str:
    """BLAKE3-256, hex."""
    return str(blake3(payload).hexdigest())


def checked_blob(payload: object, digest: str, size_bytes: int, where: str) -> bytes:
    """`payload`, whatever a store has answered, if it is there and matches its name. Raises DeltaError."""
    if payload is None:
        raise DeltaError(
            f"chunk {digest[:16]} is not in {where} (dropped by retention, not there yet, or never stored)"
        )
    if not isinstance(payload, bytes):
        raise DeltaError(f"chunk {digest[:16]}: {where} answered with {type(payload).__name__} in place of its bytes")
    if len(payload) != size_bytes or blob_digest(payload) != digest:
        raise DeltaError(
            f"chunk {digest[:16]} in {where} was altered: {len(payload)} bytes of the {size_bytes} expected, or other ones"
        )
    return payload
