"""The versioned weight channel as a protocol, with `RedisWeightChannel` and `MemoryWeightChannel`.

Invariant: `head()` only ever names a version whose manifest and blobs are readable, since blobs and manifest are
stored before the head moves, manifest and head in one transaction. Followers poll; publishing waits for nobody.
Held by tests/contract/test_weight_channel.py.
"""

from __future__ import annotations

from typing import Protocol

from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion


class WeightChannel(Protocol):
    """All methods raise StreamUnavailableError when the server cannot be reached, BackpressureError when it is full."""

    def open_epoch(self, *, above: int = 0) -> int:
        """A new epoch number, above every earlier one of this run and above `above`: the epoch of a checkpoint that is
        resumed over a hub which has lost its data."""
        ...

    def put_layout(self, layout: Layout) -> None: ...

    def layout(self, layout_hash: str) -> Layout:
        """Raises ManifestError if it is unknown or does not have that hash."""
        ...

    def put_blob(self, payload: bytes) -> str:
        """Store a chunk under its xxh3-128; returns the digest."""
        ...

    def blob(self, digest: str) -> bytes:
        """The chunk, verified against its digest. Raises DeltaError if missing or altered."""
        ...

    def commit(self, manifest: Manifest) -> None:
        """Store `manifest` and move the head to it, atomically; the same manifest again changes nothing. A second kind
        (anchor beside delta) for the head's own version is accepted.

        Raises ConfigError if the head is of a newer epoch or the same epoch at a higher version, or if a newer epoch
        has been opened: another learner has taken the run over, and this one must not overwrite its weights, nor come
        back. Raises ManifestError if another manifest stands under that version and kind, if its layout or a chunk is
        not stored, or if it is of another run."""
        ...

    def head(self) -> PolicyVersion | None: ...

    def manifest(self, policy: PolicyVersion, kind: str) -> Manifest | None:
        """The committed manifest of that version and kind ("anchor" or "delta"), or None."""
        ...

    def newest_anchor(self, epoch: int, at_most_version: int) -> Manifest | None: ...

    def retain(self, keep_versions: int) -> int:
        """Drop versions more than `keep_versions` behind the head (counted in committed versions, over epochs too), but
        never the newest anchor at or below that line nor anything after it; returns how many manifests went."""
        ...

    def close(self) -> None: ...
