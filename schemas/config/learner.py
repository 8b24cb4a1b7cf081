"""`[learner]`: the optimizer's side of a run. Held by tests/unit/schemas/test_config.py."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from anabranch.schemas.config import learner_rules
from anabranch.schemas.config.section import Dtype, Section


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
    updates_per_step: int = Field(
        1,
        ge=1,
        description="optimizer updates of one step, each on an equal part of its groups; a step is one policy version",
    )
    micro_batch_tokens: int = Field(8192, ge=16, description="tokens of one forward pass")
    packing: bool = Field(
        True,
        description="rollouts share a row without padding, attending to themselves alone; false: one padded row each",
    )
    share_prompts: bool = Field(
        True, description="with packing: a group's prompt is computed once for all its rollouts"
    )
    attention: Literal["auto", "sdpa", "flex", "flash"] = Field(
        "auto", description="of packed rows; auto: flash where installed and on a GPU, else sdpa"
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: less memory, more time"
    )
    world_size: int = Field(1, ge=1, le=64)
    zero_stage: Literal[0, 1, 2, 3] = 1
    lr: float = Field(1e-5, ge=0)
    warmup_steps: int = Field(0, ge=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="after the warm-up, until `steps`"
    )
    lr_end_ratio: float = Field(0.1, ge=0, le=1, description="of lr, at the last step of a linear or cosine schedule")
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, ge=0, description="0: off")
    checkpoint_every: int = Field(
        20, ge=1, description="steps between durable checkpoints; entries are acknowledged after one"
    )
    keep_checkpoints: int = Field(2, ge=1, description="newest complete ones that are kept")
    keep_every: int = Field(0, ge=0, description="checkpoints of every so many steps are kept for good; 0: none")
    background_checkpoints: bool = Field(
        True,
        description="a checkpoint is made durable while the next steps run; its entries are acknowledged after that",
    )
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
        learner_rules.check_deepspeed(self.deepspeed, zero_stage=self.zero_stage)
        return self
