"""How a group ended: one record for each, with what it takes to see whether those that were dropped differ from the rest.

Invariant: a delivery is named by (region, producer, seq), whatever entry of a stream carried it, and has one fate. Fates
are "trained" or "dropped:CAUSE"; an entry that nobody could read is a dead letter and has no record.
Held by tests/unit/schemas/test_fates.py.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from anabranch.schemas.errors import TrajectoryError

TRAINED = "trained"
ZERO_VARIANCE = "dropped:zero_variance"  # consumed by a step, without gradient
GATE = "dropped:gate"  # consumed by a step that a gate kept from the weights
AGE = "dropped:age"
DUPLICATE = "dropped:duplicate"
FALSE_VERSION = "dropped:false_version"  # a token claims a policy beyond the learner's
SURPLUS = "dropped:surplus"  # sampled, but the run ended first
CONSUMED = (TRAINED, ZERO_VARIANCE, GATE)  # an optimizer step saw it
LOGGED = (TRAINED, ZERO_VARIANCE, GATE, AGE, DUPLICATE, FALSE_VERSION, SURPLUS)

Identity = tuple[str, str, int]  # region, producer, seq


class FateRecord(BaseModel):
    """One line of RUN_DIRECTORY/fates/NNNNNN.jsonl."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)
    region: str
    producer: str = Field(description="identity of the spool that sent it")
    seq: int = Field(ge=0, description="of that producer")
    group_index: int = Field(ge=0)
    attempt: int = Field(ge=0)
    fate: str = Field(pattern=r"^(trained|dropped:[a-z_]+)$")
    epoch: int = Field(description="the learner's when the fate was decided; for a consumed one, that of its step")
    version: int = Field(description="likewise: the policy version that the step began with")
    age: int = Field(description="versions between the oldest token and that one")
    rollouts: int = Field(ge=1)
    tokens: int = Field(ge=1, description="completion tokens of all rollouts")
    cut: int = Field(ge=0, description="rollouts that ended at sampling.max_tokens")
    reward: float = Field(allow_inf_nan=False, description="mean of the rollouts")
    time_ms: int = Field(description="Unix time, the learner's clock")
    delivered_ms: int | None = Field(default=None, description="likewise: the learner had read and verified it")
    admitted_ms: int | None = Field(
        default=None, description="likewise: it was taken among those that wait for a batch; null: it was refused"
    )

    @property
    def identity(self) -> Identity:
        return (self.region, self.producer, self.seq)

    def line(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"


def parse_fate(line: bytes | str) -> FateRecord:
    """The record in a line of a fate log. Raises TrajectoryError: it is not one."""
    try:
        return FateRecord.model_validate_json(line)
    except ValidationError as error:
        shown = line[:80] if isinstance(line, str) else line[:80].decode(errors="replace")
        raise TrajectoryError(
            f"{shown!r} is not the fate of a group: {error.error_count()} fields are missing or wrong, "
            f"{error.errors()[0]['loc']} the first"
        ) from error
