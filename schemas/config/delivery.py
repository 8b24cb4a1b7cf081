"""`[stream]`, `[spool]`, `[ledger]` and `[recorder]`: trajectories from producer to learner.
Held by tests/unit/schemas/test_config.py."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from anabranch.schemas.config import channel_rules
from anabranch.schemas.config.section import Section

MAX_ENTRY_BYTES = 512 * 2**20  # proto-max-bulk-len of a Redis


class StreamSection(Section):
    max_entry_bytes: int = Field(
        16 * 2**20,
        ge=1024,
        le=MAX_ENTRY_BYTES,
        description="a group's entry; no more than a Redis takes (proto-max-bulk-len), and than 100 Mbit/s carry "
        "within socket_timeout_ms: what takes longer to send can never be sent",
    )
    block_ms: int = Field(200, ge=1, description="blocking read; kept below socket_timeout_ms")
    socket_timeout_ms: int = Field(5_000, ge=100, description="an entry must be sent, and answered, within it")
    claim_idle_ms: int = Field(60_000, ge=1_000, description="entries of a dead consumer are claimed after this")
    max_deliveries: int = Field(32, ge=1, description="an entry delivered more often goes to the dead-letter stream")

    max_dead_letters: int = Field(
        1_000,
        ge=1,
        description="kept per region, in its Redis's memory; the oldest make room, which `anabranch dead-letter ls` says",
    )
    read_ahead_bytes: int = Field(
        64 * 2**20, ge=2**20, description="learner: entries of a region that are read before they are asked for"
    )

    @model_validator(mode="after")
    def _block_below_timeout(self) -> Self:
        if self.block_ms >= self.socket_timeout_ms:
            raise ValueError(f"block_ms = {self.block_ms} must be below socket_timeout_ms = {self.socket_timeout_ms}")
        return self


class SpoolSection(Section):
    """A producer's disk: groups stay there until the learner has settled them."""

    dir: Path | None = Field(
        None,
        strict=False,
        description="spools are in DIR/RUN, on a disk that survives the process; default: RUN_DIRECTORY/spool",
    )
    max_bytes: int = Field(
        2**30, ge=2**16, description="of one producer; a full spool stops sampling, it never drops a group"
    )
    segment_bytes: int = Field(
        16 * 2**20, ge=4096, description="a file of the spool; it goes when all of it is settled"
    )
    fsync: Literal["always", "interval", "never"] = Field(
        "interval",
        description="always: before a group counts as spooled; interval: every fsync_interval_ms; never: left to the system. "
        "A process that dies loses nothing under any of them, a machine that loses power does",
    )
    fsync_interval_ms: int = Field(1_000, ge=1)
    release_after_ms: int = Field(
        5_000,
        ge=0,
        description="a settled group leaves the spool so much later: longer than a Redis can forget what it acknowledged "
        "(appendfsync everysec: 2 s)",
    )
    full_deadline_s: float = Field(
        3_600.0,
        gt=0,
        description="how long a full spool, a full disk under it, or a region that takes nothing while no group is finished either, "
        "is waited for before exit 75",
    )


class LedgerSection(Section):
    check_every_s: float = Field(
        10.0, gt=0, description="the learner checks produced = trained + dropped + pending of every region so often"
    )
    fate_file_lines: int = Field(100_000, ge=100, description="fates of groups in one file of RUN_DIRECTORY/fates")


class RecorderSection(Section):
    steps: bool = Field(
        True, description="the learner records every step: what it computed of each rollout (RUN_DIRECTORY/steps)"
    )
    tokens: bool = Field(
        True, description="and of each token; false: a step's record is smaller, and cannot tell where in a rollout"
    )
    rows_per_file: int = Field(4096, ge=1)
    bytes_per_file: int = Field(
        64 * 2**20,
        ge=1,
        description="of rows in memory, uncompressed: bounds what the recorder holds of a region where rollouts are long",
    )
    seconds_per_file: float = Field(20.0, gt=0)
    merge_bytes: int = Field(
        64 * 2**20,
        ge=2**16,
        description="files whose groups all have their fate are merged into larger ones of up to so many bytes",
    )
    retain_bytes: int = Field(
        0,
        ge=0,
        description="of recorded trajectories and steps together; beyond it the recorder drops the oldest. 0: it drops nothing",
    )
    store: str = Field(
        "",
        description="where the recorder keeps a copy of the run, below RUN: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, "
        "az://ACCOUNT/CONTAINER/PREFIX, file:///DIR; credentials come from the environment (AWS_ACCESS_KEY_ID, ...), never from here. "
        "Empty: nowhere. recorder.retain_bytes holds there too",
    )
    store_options: dict[str, str] = Field(
        default_factory=dict, description="options of that object store, e.g. endpoint, region, allow_http"
    )

    @field_validator("store")
    @classmethod
    def _known_store(cls, store: str) -> str:
        if store:
            channel_rules.check_store(store)
        return store

    @model_validator(mode="after")
    def _no_secrets(self) -> Self:
        channel_rules.check_blob_options(self.store, self.store_options, key="recorder.store_options")
        return self
