"""The index of the weight channel: one short entry per manifest, enough to plan a path without reading a manifest.

Invariant: an entry says nothing that its manifest does not say; a plan made from entries is checked again on the
manifests themselves before a byte is written. Held by tests/unit/schemas/test_weight_index.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from anabranch.schemas.errors import ManifestError
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion

_NUMBER = "(?:0|[1-9][0-9]{0,14})"
_ENTRY = re.compile(
    f"(?P<epoch>{_NUMBER}):(?P<version>{_NUMBER}):(?P<label>anchor|delta|fork|skip[1-9][0-9]{{0,9}}):"
    f"(?P<base>{_NUMBER}:{_NUMBER}|-:-):(?P<bytes>{_NUMBER}):(?P<chunks>{_NUMBER}):(?P<digest>[0-9a-f]{{32}})"
)
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
        found = _ENTRY.fullmatch(text)
        if found is None:
            raise ManifestError(f"not an entry of the weight index: {text[:200]!r}")
        label, base, digest = found["label"], found["base"], found["digest"]
        policy = PolicyVersion(int(found["epoch"]), int(found["version"]))
        before = None if base == "-:-" else PolicyVersion(*map(int, base.split(":")))
        if (before is None) != (label == "anchor") or (before is not None and before >= policy):
            raise ManifestError(f"an entry of the weight index does not lead forward: {text[:200]!r}")
        return cls(policy, label, before, int(found["bytes"]), int(found["chunks"]), digest)
