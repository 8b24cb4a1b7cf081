"""The index of the weight channel: one short entry per manifest, enough to plan a path without reading a manifest.

Invariant: an entry says nothing that its manifest does not say; a plan made from entries is checked again on the
manifests themselves before a byte is written. Held by tests/unit/schemas/test_weight_index.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.schemas.errors import ManifestError
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion

EPOCH_STRIDE = 2**32  # score = epoch · stride + version: exact in a double for 2^21 epochs


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """`label` as in `Manifest.label`; `base` None for an anchor; `digest` is the result digest."""

    policy: PolicyVersion
    label: str
    base: PolicyVersion | None
    payload_bytes: int
    chunks: int
    digest: str

    @classmethod
    def of(cls, manifest: Manifest) -> IndexEntry:
        base = manifest.base.policy if manifest.base else None
        return cls(
            manifest.policy, manifest.label, base, manifest.payload_bytes, len(manifest.chunks), manifest.result_digest
        )

    @property
    def score(self) -> int:
        return self.policy.epoch * EPOCH_STRIDE + self.policy.version

    def to_text(self) -> str:
        """`E:V:label:BE:BV:bytes:chunks:digest`, BE and BV "-" for an anchor."""
        base = f"{self.base.epoch}:{self.base.version}" if self.base else "-:-"
        return (
            f"{self.policy.epoch}:{self.policy.version}:{self.label}:{base}:"
            f"{self.payload_bytes}:{self.chunks}:{self.digest}"
        )

    @classmethod
    def from_text(cls, text: str) -> IndexEntry:
        """Inverse of `to_text`. Raises ManifestError on anything else."""
        try:
            epoch, version, label, base_epoch, base_version, size, chunks, digest = text.split(":")
            base = None if base_epoch == "-" else PolicyVersion(int(base_epoch), int(base_version))
            return cls(PolicyVersion(int(epoch), int(version)), label, base, int(size), int(chunks), digest)
        except ValueError as error:
            raise ManifestError(f"not an entry of the weight index: {text[:200]!r}") from error
