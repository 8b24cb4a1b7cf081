"""`[channel]`: the weight channel. Held by tests/unit/schemas/test_config.py."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from anabranch.schemas.config import channel_rules
from anabranch.schemas.config.section import Section


class ChannelSection(Section):
    blobs: str = Field(
        "redis",
        description="where weight chunks are kept: redis (the hub), or s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, "
        "az://ACCOUNT/CONTAINER/PREFIX, file:///DIR; "
        "credentials come from the environment (AWS_ACCESS_KEY_ID, ...), never from here",
    )
    blob_options: dict[str, str] = Field(
        default_factory=dict, description="options of the object store, e.g. endpoint, region, allow_http"
    )
    region_cache_bytes: int = Field(
        0,
        ge=0,
        description="keep chunks of an object store in the region's Redis, up to so many bytes, so that they cross the "
        "WAN once for all its producers; 0: off",
    )
    codec_threads: int = Field(
        2, ge=1, le=256, description="threads of the delta codec, in the learner and in producers"
    )
    fetch_threads: int = Field(
        64, ge=1, le=256, description="chunks fetched at once by a follower: over a WAN each costs a round trip"
    )
    skip_levels: int = Field(
        10,
        ge=0,
        le=20,
        description="merged deltas over 2, 4, ... 2^N versions are published in the background; 0: none",
    )
    skip_memory_bytes: int = Field(
        2 * 2**30,
        ge=0,
        description="memory of a learner rank for making skip deltas; longer skips are left out above it",
    )
    retain_bytes: int = Field(
        4 * 2**30,
        ge=0,
        description="bytes on the channel (chunks, and 16 KiB for each manifest) above which what no follower can need is "
        "dropped",
    )
    lease_ms: int = Field(
        120_000, ge=1_000, description="a follower that has not reported for so long may find its versions dropped"
    )
    signing_key_file: Path | None = Field(
        None, strict=False, description="learner: Ed25519 private key (PEM) that signs manifests"
    )
    trusted_keys: tuple[str, ...] = Field(
        (), description="producers: Ed25519 public keys (hex); if any, manifests must be signed by one of them"
    )
    connect_deadline_s: float = Field(60.0, gt=0)

    @field_validator("trusted_keys", mode="before")
    @classmethod
    def _keys(cls, value: object) -> object:
        if not isinstance(value, list | tuple):
            raise ValueError('a list of Ed25519 public keys of 64 hex digits each, such as ["ab12..."]')
        return tuple(value)

    @field_validator("trusted_keys")
    @classmethod
    def _hex_keys(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        for key in keys:
            channel_rules.check_trusted_key(key)
        return keys

    @field_validator("blobs")
    @classmethod
    def _known_store(cls, blobs: str) -> str:
        channel_rules.check_blobs(blobs)
        return blobs

    @model_validator(mode="after")
    def _no_secrets(self) -> Self:
        channel_rules.check_blob_options(self.blobs, self.blob_options)
        return self
