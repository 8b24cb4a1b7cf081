"""versions.jsonl: a line for every manifest that the learner committed, so that the run directory tells which weights a
version was when the channel has long dropped it.

Invariant: a manifest is named by (epoch, version, label); who reads takes the first line of each name and passes over what is
no whole line. Held by tests/unit/schemas/test_version_record.py.
"""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from anabranch.schemas.errors import ManifestError
from anabranch.schemas.manifest import Kind, Manifest
from anabranch.schemas.versions import PolicyVersion

VERSIONS_FILE = "versions.jsonl"


class VersionRecord(BaseModel):
    """One line of RUN_DIRECTORY/versions.jsonl."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)
    time_ms: int = Field(description="Unix time of the manifest, the learner's clock")
    epoch: int = Field(ge=0)
    version: int = Field(ge=0)
    kind: Kind
    label: str = Field(description="kind, with the length of a skip: anchor, delta, skip4, fork")
    base: int | None = Field(default=None, description="version that it goes from; null for an anchor")
    base_epoch: int | None = Field(default=None, description="of the base: an older one for a fork")
    payload_bytes: int = Field(ge=0)
    full_bytes: int = Field(ge=0, description="of the dense state")
    changed_fraction: float = Field(ge=0, le=1, description="share of the elements that it changes")
    result_digest: str = Field(description="root digest of the state that it leads to")
    commit_s: float | None = Field(
        default=None, description="from the copy of the weights to the commit; null for what is made beside the steps"
    )

    @property
    def policy(self) -> PolicyVersion:
        return PolicyVersion(self.epoch, self.version)

    @property
    def name(self) -> tuple[int, int, str]:
        return (self.epoch, self.version, self.label)

    @classmethod
    def of(cls, manifest: Manifest, *, commit_s: float | None = None) -> Self:
        return cls(
            time_ms=manifest.published_ms,
            epoch=manifest.epoch,
            version=manifest.version,
            kind=manifest.kind,
            label=manifest.label,
            base=manifest.base.version if manifest.base else None,
            base_epoch=manifest.base.epoch if manifest.base else None,
            payload_bytes=manifest.payload_bytes,
            full_bytes=manifest.full_bytes,
            changed_fraction=min(1.0, manifest.changed_elements / max(1, manifest.total_elements)),
            result_digest=manifest.result_digest,
            commit_s=commit_s,
        )

    def line(self) -> bytes:
        return self.model_dump_json(exclude_none=True).encode() + b"\n"


def parse_version(line: bytes | str) -> VersionRecord:
    """The record in a line of versions.jsonl. Raises ManifestError: it is not one."""
    try:
        return VersionRecord.model_validate_json(line)
    except ValidationError as error:
        raise ManifestError(f"not the record of a version: {error.errors(include_url=False)[0]['msg']}") from error
