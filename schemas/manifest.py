"""Weight manifests: what a version on the channel is, and what it may be applied to.

Invariant: a manifest binds its chunks to one run, one version, one base state and one result state, all by digest. A
follower refuses it before a byte is written unless run, base, layout, codec and (where keys are configured) signature
match. Held by tests/unit/schemas/test_manifest.py.

Kinds:
    anchor  the full state of a version; no base
    delta   one step: base is the version before, of the same epoch
    skip    several steps at once, merged: base is 2^k versions before, of the same epoch
    fork    the first version of an epoch whose state *is* a version of an older epoch: base is that one, no chunks
"""

from __future__ import annotations

import json
from typing import Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from anabranch.schemas.errors import ManifestError
from anabranch.schemas.versions import PolicyVersion

HEX128 = r"^[0-9a-f]{32}$"
HEX256 = r"^[0-9a-f]{64}$"
HEX512 = r"^[0-9a-f]{128}$"
MAX_CHUNK_BYTES = 512 * 2**20
MAX_MANIFEST_BYTES = 64 * 2**20  # about 600,000 chunks: refused before it is parsed
FORMAT: Final = "anabranch.manifest/2"
Kind = Literal["anchor", "delta", "skip", "fork"]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Chunk(Frozen):
    """One blob: content-addressed by the BLAKE3-256 of its bytes. A cryptographic digest, so that a signed manifest
    vouches for its chunks too."""

    digest: str = Field(pattern=HEX256)
    size_bytes: int = Field(ge=0, le=MAX_CHUNK_BYTES)


class Base(Frozen):
    """The state that a manifest applies to."""

    epoch: int = Field(ge=0)
    version: int = Field(ge=0)
    digest: str = Field(pattern=HEX128)

    @property
    def policy(self) -> PolicyVersion:
        return PolicyVersion(self.epoch, self.version)


class Signature(Frozen):
    """Ed25519 over `Manifest.signed_bytes()`; `key` is the public key, hex."""

    key: str = Field(pattern=HEX256)
    signature: str = Field(pattern=HEX512)


class Manifest(Frozen):
    format: Literal["anabranch.manifest/2"] = FORMAT
    kind: Kind
    run: str = Field(max_length=100)
    epoch: int = Field(ge=0, lt=2**21)
    version: int = Field(ge=0, lt=2**32, description="policy version that results")
    base: Base | None = None
    result_digest: str = Field(pattern=HEX128)
    layout_hash: str = Field(pattern=HEX128)
    codec: str = Field(max_length=100, description="codec name and major version, e.g. 'class-golomb/1'")
    chunks: tuple[Chunk, ...] = Field(strict=False)
    full_bytes: int = Field(ge=0, lt=2**63, description="bytes of the dense state")
    changed_elements: int = Field(ge=0, lt=2**63)
    total_elements: int = Field(ge=0, lt=2**63)
    learner_step: int = Field(ge=0, lt=2**63)
    fork_version: int = Field(ge=0, lt=2**32, description="version at which this epoch began")
    published_ms: int = Field(ge=0, lt=2**63, description="Unix time, the learner's clock")
    signature: Signature | None = None

    @model_validator(mode="after")
    def _bound_to_its_base(self) -> Self:
        base = self.base
        if (base is None) != (self.kind == "anchor"):
            raise ValueError(f"kind {self.kind} {'must not have' if base else 'needs'} a base")
        if base is None:
            return self
        if self.kind == "fork":
            fits = base.epoch < self.epoch and base.version == self.version and not self.chunks
            if not fits or base.digest != self.result_digest:
                raise ValueError(f"a fork repeats a version of an older epoch, it cannot lead from {base.policy} here")
        else:
            steps = self.version - base.version
            power = steps >= 2 and steps & (steps - 1) == 0 and self.version % steps == 0
            if base.epoch != self.epoch or (steps != 1 if self.kind == "delta" else not power):
                raise ValueError(f"{self.kind} goes from {base.policy} to {self.policy}")
        return self

    @property
    def policy(self) -> PolicyVersion:
        return PolicyVersion(self.epoch, self.version)

    @property
    def steps(self) -> int:
        """Versions it goes forward: 0 for an anchor and a fork."""
        return self.version - self.base.version if self.base else 0

    @property
    def label(self) -> str:
        """Names it among the manifests of its version: "anchor", "delta", "fork", "skip2", "skip4", ..."""
        return f"skip{self.steps}" if self.kind == "skip" else self.kind

    @property
    def payload_bytes(self) -> int:
        return sum(c.size_bytes for c in self.chunks)

    def signed_bytes(self) -> bytes:
        """What a signature is made over: all fields but the signature, as JSON with sorted keys and no spaces."""
        fields = self.model_dump(mode="json", exclude={"signature"})
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Raises ManifestError if `text` is not a valid manifest or larger than `MAX_MANIFEST_BYTES`."""
        if len(text) > MAX_MANIFEST_BYTES:
            raise ManifestError(f"a manifest of {len(text)} bytes; the limit is {MAX_MANIFEST_BYTES}")
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ManifestError(f"not a weight manifest: {error.errors(include_url=False)[0]['msg']}") from error
