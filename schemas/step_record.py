"""What a learner leaves of one optimizer step: its facts, and a row for each rollout it worked on.

Invariant: a step record is whole when its facts are there, for they are written last. What has to be compared bit for bit is
kept as bits too (`float.hex`), and per-token values as the float32 that the step computed. Held by
tests/unit/schemas/test_step_record.py.

    RUN_DIRECTORY/steps/epoch=E/NNNNNN/rank-R.parquet   ROLLOUT_SCHEMA: the rollouts that rank R worked on
                                       facts.json       StepFacts

E is the epoch that did the step, NNNNNN its number: the policy version that it led to. A learner that starts again opens
another epoch, so it never writes where an earlier one has.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any, Final, Literal, Self

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from anabranch.schemas.errors import StepRecordError
from anabranch.schemas.fates import Identity
from anabranch.schemas.versions import PolicyVersion

STEPS_DIRECTORY = "steps"
FACTS_FILE = "facts.json"
FORMAT: Final = "anabranch.step/1"
_MAJOR_KEY = b"anabranch.step"
_EPOCH = re.compile(r"epoch=(0|[1-9][0-9]{0,8})\Z")
_STEP = re.compile(r"([0-9]{6}|[1-9][0-9]{6,14})\Z")

TOKEN_COLUMNS = ("logprob", "proximal", "entropy", "factor", "kept")
ROLLOUT_SCHEMA = pa.schema(
    [
        pa.field("region", pa.string(), False),
        pa.field("producer", pa.string(), False),  # identity of the spool that sent the group, as in a fate
        pa.field("seq", pa.int64(), False),  # of that producer
        pa.field("group_index", pa.int64(), False),
        pa.field("sample_index", pa.int32(), False),
        pa.field("row", pa.int32(), False),  # of the batch
        pa.field("update", pa.int32(), False),  # 0 .. learner.updates_per_step − 1
        pa.field("applied", pa.bool_(), False),  # false: a gate kept that update from the weights
        pa.field("tokens", pa.int32(), False),  # completion tokens, T
        pa.field(
            "age_max", pa.int32(), False
        ),  # versions between its oldest token and the policy that the step began with
        # null for a rollout of a group without gradient: no forward pass saw it
        pa.field("advantage", pa.float64()),
        pa.field("weight", pa.float64()),  # of each of its tokens in the loss, before trust region and age weight
        pa.field("ratio_mean", pa.float32()),  # of e^(logprob − the recorded log-prob), the exponent within ±20
        pa.field("ratio_max", pa.float32()),
        pa.field("kept_fraction", pa.float32()),  # tokens that trust region and veto left in the objective
        pa.field("loss_share", pa.float64()),  # its part of the update's loss
        # [T], null as above, and with recorder.tokens = false
        pa.field("logprob", pa.list_(pa.float32())),  # under the policy that the update began with
        pa.field("proximal", pa.list_(pa.float32())),  # under the policy that the step began with; null: the same
        pa.field("entropy", pa.list_(pa.float32())),  # nats, of the distribution that the token was drawn from
        # d loss / d logprob over −weight·advantage: what the token's gradient was multiplied by. Ratio, mask, age weight and
        # penalty are in it; null where weight·advantage is 0
        pa.field("factor", pa.list_(pa.float32())),
        pa.field("kept", pa.list_(pa.bool_())),
    ],
    metadata={_MAJOR_KEY: b"1"},
)


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")


class GroupFacts(_Facts):
    """A group of the batch: the delivery that brought it."""

    region: str
    producer: str = Field(description="identity of the spool that sent it")
    seq: int = Field(ge=0, description="of that producer")
    group_index: int = Field(ge=0)
    attempt: int = Field(ge=0)
    process: str = Field(
        description="the column `producer` of its payload: who sampled it, if somebody else appended it"
    )
    rollouts: int = Field(ge=1)

    @property
    def identity(self) -> Identity:
        return (self.region, self.producer, self.seq)


class UpdateResult(_Facts):
    """One optimizer update of the step. NaN and infinities are strings in JSON, which has no numbers for them."""

    loss: float
    loss_bits: str = Field(description="float.hex()")
    grad_norm: float = Field(description="before clipping")
    grad_norm_bits: str
    applied: bool = Field(description="false: a gate kept it from the weights")

    @classmethod
    def of(cls, loss: float, grad_norm: float, *, applied: bool) -> Self:
        return cls(
            loss=loss, loss_bits=loss.hex(), grad_norm=grad_norm, grad_norm_bits=grad_norm.hex(), applied=applied
        )


class StepFacts(_Facts):
    """facts.json."""

    format: Literal["anabranch.step/1"] = FORMAT
    run: str
    epoch: int = Field(ge=0, description="that did the step")
    version_before: int = Field(ge=0, description="policy version that it began with")
    step: int = Field(ge=1, description="its number, the policy version that it led to")
    now: str = Field(description="the policy that it began with, as a tag such as e1.v41")
    forks: dict[int, int] = Field(description="epoch -> the version at which it began, of this line")
    time_ms: int = Field(description="Unix time at its end")
    step_s: float = Field(description="forward, backward, optimizer")
    lr: float
    loss: float = Field(description="of the first update, as are the figures that follow")
    loss_bits: str
    grad_norm: float
    grad_norm_bits: str
    updates: list[UpdateResult] = Field(min_length=1, description="in order")
    groups: list[GroupFacts] = Field(min_length=1, description="in the order of the batch")
    zero_variance: list[int] = Field(description="indices of groups without gradient")
    skipped: list[int] = Field(description="indices of groups whose update a gate kept from the weights")
    alarms: list[str] = Field(description="gates that were not passed, with value and bound")
    settings: dict[str, Any] = Field(description="what determines the arithmetic: sections of the configuration")
    config_digest: str = Field(description="of settings, hex")
    world_size: int = Field(ge=1, description="ranks, each with a file of its own")
    zero_stage: int
    dtype: str
    compute_dtype: str
    device: str
    threads: int = Field(description="CPU threads of a rank")
    packages: dict[str, str] = Field(description="name -> version")
    cpu: str = Field(description="its name, and the instructions that torch uses")
    gpu: str = Field(default="", description="its name, '' for none")
    tokens: bool = Field(description="whether the rank files hold lists of per-token values")
    weights_digest: str | None = Field(
        default=None, description="root digest of the weights after it; null: see versions.jsonl"
    )

    @model_validator(mode="after")
    def _one_step(self) -> Self:
        if self.step != self.version_before + 1 or self.now != str(PolicyVersion(self.epoch, self.version_before)):
            raise ValueError(f"step {self.step} cannot lead from {self.now}, version {self.version_before}")
        return self

    @property
    def rollouts(self) -> int:
        return sum(group.rollouts for group in self.groups)

    def to_json(self) -> bytes:
        return self.model_dump_json(indent=1).encode()


def parse_facts(text: bytes | str) -> StepFacts:
    """Inverse of `StepFacts.to_json`. Raises StepRecordError."""
    try:
        return StepFacts.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise StepRecordError(
            f"not the facts of a step: {'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}"
        ) from error


def step_folder(epoch: int, step: int) -> PurePosixPath:
    """Of a step's record, inside the run directory."""
    return PurePosixPath(STEPS_DIRECTORY, f"epoch={epoch}", f"{step:06d}")


def rank_file(rank: int) -> str:
    return f"rank-{rank}.parquet"


def parse_folder(epoch_name: str, step_name: str) -> tuple[int, int] | None:
    """(epoch, step) of the folder EPOCH_NAME/STEP_NAME, None if a step's record is never kept there."""
    epoch, step = _EPOCH.match(epoch_name), _STEP.match(step_name)
    return None if epoch is None or step is None else (int(epoch[1]), int(step[1]))
