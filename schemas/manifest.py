"""Weight manifests: what a version on the channel is, and what it may be applied to.

Invariant: a manifest binds a payload to one run epoch, one base state and one result state by digest. A
follower refuses it before a byte is written unless epoch, base version, base digest and layout hash match.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from anabranch.schemas.errors import ManifestError
from anabranch.schemas.versions import PolicyVersion

HEX128 = r"^[0-9a-f]{32}$"
MAX_CHUNK_BYTES = 512 * 2**20


class Chunk(BaseModel):
    """One blob: content-addressed by the xxh3-128 of its bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    digest: str = Field(pattern=HEX128)
    size_bytes: int = Field(ge=0, le=MAX_CHUNK_BYTES)


class Manifest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    format: Literal["anabranch.manifest/1"] = "anabranch.manifest/1"
    kind: Literal["anchor", "delta"]
    run: str
    epoch: int = Field(ge=0)
    version: int = Field(ge=0, description="policy version that results")
    base_version: int | None = Field(default=None, ge=0, description="delta: policy version it applies to, same epoch")
    base_digest: str | None = Field(default=None, pattern=HEX128)
    result_digest: str = Field(pattern=HEX128)
    layout_hash: str = Field(pattern=HEX128)
    codec: str = Field(description="codec name and major version, e.g. 'class-golomb/1'")
    chunks: tuple[Chunk, ...]
    full_bytes: int = Field(ge=0, description="bytes of the dense state")
    changed_elements: int = Field(ge=0)
    total_elements: int = Field(ge=0)
    learner_step: int = Field(ge=0)
    fork_version: int = Field(ge=0, description="version at which this epoch began")
    published_ms: int = Field(ge=0, description="Unix time, the learner's clock")

    @model_validator(mode="after")
    def _bound_to_its_base(self) -> Self:
        is_delta = self.kind == "delta"
        if is_delta != (self.base_version is not None) or is_delta != (self.base_digest is not None):
            raise ValueError(
                f"kind {self.kind} {'needs' if is_delta else 'must not have'} base_version and base_digest"
            )
        if self.base_version is not None and self.base_version >= self.version:
            raise ValueError(f"delta goes from version {self.base_version} to {self.version}")
        return self

    @property
    def policy(self) -> PolicyVersion:
        return PolicyVersion(self.epoch, self.version)

    @property
    def payload_bytes(self) -> int:
        return sum(c.size_bytes for c in self.chunks)

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Raises ManifestError if `text` is not a valid manifest."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ManifestError(f"not a weight manifest: {error.errors(include_url=False)[0]['msg']}") from error
