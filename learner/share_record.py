"""What a rank leaves on the hub for rank 0: which chunks hold its share of a manifest, and how the digest moves.

Invariant: a record says which manifest and which rank it is of, and is refused anywhere else. Where manifests are signed
records are too, by the same key: rank 0 signs no chunk that somebody else has slipped in. Held by
tests/unit/learner/test_commits.py.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, cast

from pydantic import Field, ValidationError

from anabranch.kernels.digest import Sums
from anabranch.schemas.errors import ManifestError
from anabranch.schemas.manifest import MAX_MANIFEST_BYTES, Chunk, Frozen, Signature
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.signing import Signer, Verifier

Lane = Annotated[int, Field(ge=0, lt=2**64)]
OPENING, DECISION = "opening", "decision"  # labels of records that belong to no manifest


class ShareRecord(Frozen):
    """`label` is that of the manifest, `OPENING` (the sums of a whole share) or `DECISION` (rank 0's)."""

    format: Literal["anabranch.share/1"] = "anabranch.share/1"
    run: str = Field(max_length=100)
    epoch: int = Field(ge=0)
    version: int = Field(ge=0)
    label: str = Field(max_length=100)
    rank: int = Field(ge=0)
    chunks: tuple[Chunk, ...] = Field((), strict=False)
    changed_elements: int = Field(0, ge=0)
    sums: tuple[tuple[int, Lane, Lane], ...] = Field(
        (), strict=False, description="tensor of the layout, and by how much its digest's two sums grew (modulo 2^64)"
    )
    kind: Literal["", "anchor", "fork"] = Field("", description="of a decision: how the epoch begins")
    declined: str = Field("", max_length=1000, description="why this rank does not make its part; '' if it has")
    lasting: bool = Field(False, description="of what is declined: another start would meet the same")
    signature: Signature | None = None

    @property
    def policy(self) -> PolicyVersion:
        return PolicyVersion(self.epoch, self.version)

    def signed_bytes(self) -> bytes:
        fields = self.model_dump(mode="json", exclude={"signature"})
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    def sums_by_tensor(self) -> dict[int, Sums]:
        return {tensor: (a, b) for tensor, a, b in self.sums}

    def to_text(self, signer: Signer | None) -> str:
        # A signer asks of what it signs only `signed_bytes` and a field for the signature.
        record = self if signer is None else cast(ShareRecord, signer.sign(cast(Any, self)))
        return record.model_dump_json()


def read_record(
    text: str, *, run: str, policy: PolicyVersion, label: str, rank: int, signer: Signer | None
) -> ShareRecord:
    """Raises ManifestError if `text` is not the record of that rank and manifest, or is not signed as ours are."""
    about = f"what rank {rank} has left of {label} {policy}"
    if len(text) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"{about} has {len(text)} bytes; the limit is {MAX_MANIFEST_BYTES}")
    try:
        record = ShareRecord.model_validate_json(text)
    except ValidationError as error:
        raise ManifestError(
            f"{about} is not a share record: {error.errors(include_url=False, include_input=False)[0]['msg']}"
        ) from None
    if (record.run, record.policy, record.label, record.rank) != (run, policy, label, rank):
        raise ManifestError(f"{about} is a record of rank {record.rank}, {record.label} {record.policy}")
    if signer is not None:
        Verifier([signer.public_key]).check(cast(Any, record))
    return record
