"""`[learner]` and `[correction]`: the optimizer's side of a run. Held by tests/unit/schemas/test_config.py."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from anabranch.schemas.config import learner_rules
from anabranch.schemas.config.section import Dtype, Section

Objective = Literal["dppo_tv", "grpo", "dr_grpo", "none"]

# What an objective's paper pairs it with: used for the keys that the user leaves out.
_OBJECTIVE_DEFAULTS: dict[str, dict[str, str | float]] = {
    "dppo_tv": {"advantage": "dr_grpo", "aggregation": "token_mean", "penalty": 1e-3},
    "grpo": {"advantage": "grpo", "aggregation": "seq_mean_token_mean", "penalty": 0.0},
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "constant", "penalty": 0.0},
    "none": {"advantage": "dr_grpo", "aggregation": "token_mean", "penalty": 0.0},
}


class CorrectionSection(Section):
    """Off-policy correction, see docs/staleness.md. `grpo` and `dr_grpo` share one clipped objective; they differ in
    the defaults of advantage, aggregation and penalty (as do the others: `_OBJECTIVE_DEFAULTS`)."""

    objective: Objective = "dppo_tv"
    max_age: int = Field(
        8, ge=0, description="hard bound: a group with an older token never reaches the loss; 0 is synchronous"
    )
    tau: float = Field(0.2, gt=0, description="dppo_tv: trust region on the probability difference")
    ratio_cap: float = Field(20.0, gt=0, description="dppo_tv: cap on the importance ratio")
    penalty: float = Field(
        1e-3, ge=0, description="weight of the d² penalty; default 0 for objectives other than dppo_tv"
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="grpo, dr_grpo: lower clip")
    clip_high: float = Field(0.28, gt=0, description="grpo, dr_grpo: upper clip")
    veto_low: float = Field(1e-4, ge=0, description="a trajectory with any ratio below is dropped from the loss")
    veto_high: float = Field(100.0, gt=1, description="a trajectory with any ratio above is dropped from the loss")
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "dr_grpo"
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"] = "token_mean"

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_objective(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return _OBJECTIVE_DEFAULTS.get(str(values.get("objective", "dppo_tv")), {}) | values


class LearnerSection(Section):
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Dtype = Field("bfloat16", description="weights as published; the optimizer keeps float32 masters")
    compute_dtype: Dtype | None = Field(
        None,
        description="of forward and backward. float32 with dtype bfloat16 computes in float32 with the published bf16 "
        "weights. Default: float32 on the CPU at zero_stage 0 to 2 (exact, and faster than bf16 there), else as dtype",
    )
    steps: int = Field(100, ge=1)
    groups_per_step: int = Field(32, ge=1, description="B: groups consumed by one optimizer step")
    micro_batch_tokens: int = Field(8192, ge=16, description="padded tokens of one forward pass")
    world_size: int = Field(1, ge=1, le=64)
    zero_stage: Literal[0, 1, 2, 3] = 1
    lr: float = Field(1e-5, ge=0)
    warmup_steps: int = Field(0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, ge=0, description="0: off")
    checkpoint_every: int = Field(
        20, ge=1, description="steps between durable checkpoints; entries are acknowledged after one"
    )
    keep_checkpoints: int = Field(2, ge=1)
    batch_deadline_s: float = Field(600.0, gt=0, description="how long a step waits for its batch before exit 75")
    evaluate: bool = Field(True, description="held-out evaluation before the first and after the last step")
    evaluate_deadline_s: float = Field(300.0, gt=0)
    threads: int = Field(1, ge=1, description="CPU threads per rank")
    target_reward: float | None = Field(None, description="stop early when the smoothed mean reward reaches it")
    deepspeed: dict[str, Any] = Field(default_factory=dict, description="merged over the generated DeepSpeed JSON")

    @field_validator("betas", mode="before")
    @classmethod
    def _tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @property
    def resolved_compute_dtype(self) -> str:
        return learner_rules.compute_dtype(
            self.compute_dtype, device=self.device, dtype=self.dtype, zero_stage=self.zero_stage
        )

    @model_validator(mode="after")
    def _what_the_learner_can_do(self) -> Self:
        learner_rules.check_dtypes(dtype=self.dtype, compute=self.resolved_compute_dtype, zero_stage=self.zero_stage)
        learner_rules.check_deepspeed(self.deepspeed)
        return self
