"""The versioned weight channel as a protocol, with `RedisWeightChannel` and `MemoryWeightChannel`.

Invariant: `head()` only ever names a version whose manifest and chunks are readable, since chunks are stored before the
manifest, and manifest, index entry and head move in one transaction. Followers poll; publishing waits for nobody.
Retention never takes a version that a lease or a pin protects. Held by tests/contract/test_weight_channel.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.blob_store import BlobStore

Named = tuple[PolicyVersion, str]  # a manifest by its version and label


@dataclass(frozen=True, slots=True)
class Lease:
    """`holder` may still need every version from `policy` to the head, until `expires_in_ms` from now."""

    holder: str
    policy: PolicyVersion
    expires_in_ms: int


class WeightChannel(Protocol):
    """One object belongs to one thread, its `blobs` to any. All methods raise StreamUnavailableError when the server
    cannot be reached, BackpressureError when it is full."""

    @property
    def blobs(self) -> BlobStore: ...

    def open_epoch(self, *, above: int = 0) -> int:
        """A new epoch number, above every earlier one of this run and above `above`: the epoch of a checkpoint that is
        resumed over a hub which has lost its data. Raises ManifestError if the head on the hub is not readable."""
        ...

    def put_layout(self, layout: Layout) -> None: ...

    def layout(self, layout_hash: str) -> Layout:
        """Raises ManifestError if it is unknown or does not have that hash."""
        ...

    def put_share(self, policy: PolicyVersion, label: str, rank: int, text: str) -> None:
        """Leave word for rank 0: what `rank` has stored of that manifest. It expires after some minutes."""
        ...

    def shares(self, policy: PolicyVersion, label: str) -> dict[int, str]:
        """What ranks have left for that manifest so far."""
        ...

    def drop_shares(self, policy: PolicyVersion, label: str) -> None:
        """Rank 0 has read what it needs."""
        ...

    def commit(self, manifest: Manifest) -> None:
        """Store `manifest` and its index entry, atomically; the same manifest again changes nothing.

        A new version (kind delta, or anchor or fork of a version above the head) moves the head in the same transaction.
        A further manifest of a version that is there (an anchor beside its delta, a skip) does not.

        Raises ConfigError if the head is of a newer epoch, or a newer epoch has been opened: another learner has taken
        the run over, and this one must not overwrite its weights, nor come back.
        Raises ManifestError if another manifest stands under that version and label; if the version is there with
        another digest; if its base is not there or has another digest; if a delta's base is not the head; if its layout
        or (chunks in Redis) a chunk is not stored; if it is of another run; or if the head is not readable."""
        ...

    def head(self) -> PolicyVersion | None: ...

    def manifests(self, names: Sequence[Named]) -> list[Manifest | None]:
        """The committed manifests of those names, in order, None for one that is not there. One round trip."""
        ...

    def index(self, *, above: PolicyVersion | None = None) -> list[IndexEntry]:
        """Entries of every manifest, ascending by version; with `above` only those of versions after it."""
        ...

    def news(self, above: PolicyVersion) -> tuple[PolicyVersion | None, list[IndexEntry]]:
        """`head()` and `index(above=above)` of one moment, in one round trip."""
        ...

    def lease(self, holder: str, policy: PolicyVersion, *, ttl_ms: int) -> None:
        """`holder` serves or starts from `policy`; replaces its lease before. Needs the hub, not a replica."""
        ...

    def release(self, holder: str) -> None: ...

    def leases(self) -> list[Lease]:
        """Those that have not expired, by the hub's clock."""
        ...

    def pin(self, policy: PolicyVersion, note: str) -> None:
        """Protect a version until `unpin`. Raises ManifestError if it is not on the channel."""
        ...

    def unpin(self, policy: PolicyVersion) -> bool: ...

    def pins(self) -> dict[PolicyVersion, str]: ...

    def drop(self, entries: Iterable[IndexEntry]) -> list[IndexEntry]:
        """Drop these manifests, except what the head, a pin or a lease taken meanwhile protects, in one transaction;
        chunks that no manifest names any more go too (at once from Redis, after a grace from an object store).
        Returns what went."""
        ...

    def collect_garbage(self) -> int:
        """Delete chunks whose grace has passed from the blob store; returns how many."""
        ...

    def disown(self, digests: Iterable[str]) -> int:
        """Chunks of the blob store that no manifest names, nor anybody is publishing, become garbage: `collect_garbage`
        deletes them, those in Redis expire. Returns how many of `digests` they are."""
        ...

    def close(self) -> None: ...
