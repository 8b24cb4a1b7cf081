"""Rules of the learner's section that tie several keys together: dtypes and ZeRO stage, and DeepSpeed keys that are ours.

Invariant: keys that would break what the learner promises (batch accounting, schedule, precision) are refused by name;
so are dtypes that cannot be combined. Held by tests/unit/schemas/test_learner_rules.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What the learner decides itself, and why.
OWNED = {
    "train_batch_size": "the learner counts its own batches",
    "train_micro_batch_size_per_gpu": "set learner.micro_batch_tokens",
    "gradient_accumulation_steps": "set learner.micro_batch_tokens",
    "managed_gradient_accumulation": "one optimizer step per batch is the learner's to end",
    "scheduler": "set learner.lr and learner.warmup_steps",
    "gradient_clipping": "set learner.grad_clip",
    "bf16": "set learner.dtype",
    "fp16": "set learner.dtype",
    "data_types": "gradients are accumulated in float32",
    "zero_optimization.stage": "set learner.zero_stage",
    "optimizer.params.lr": "set learner.lr",
    "bfloat16": "set learner.dtype",
    "torch_autocast": "set learner.compute_dtype",
    "activation_checkpointing": "set learner.gradient_checkpointing",
    "elasticity": "set learner.world_size",
    "sequence_parallel_size": "ranks share a batch's rollouts, not their tokens",
    "tensor_parallel": "ranks share a batch's rollouts, not a model's layers",
    "zero_optimization.zenflow": "an update has to be whole before the next version is published",
    "zero_optimization.offload_optimizer.super_offload": "an update has to be whole before the next version is published",
}


def compute_dtype(compute: str | None, *, device: str, dtype: str, zero_stage: int) -> str:
    """The dtype of forward and backward: as configured, else float32 on the CPU where that is possible (a CPU without
    bf16 instructions is ten times slower in bf16), else the dtype of the weights."""
    if compute is not None:
        return compute
    return "float32" if device == "cpu" and zero_stage < 3 else dtype


def check_dtypes(*, dtype: str, compute: str, zero_stage: int) -> None:
    """Raises ValueError for a combination that is not supported. `compute`: a result of `compute_dtype`."""
    if "float16" in (dtype, compute):
        raise ValueError("learner: float16 needs loss scaling, which skips steps; use bfloat16 or float32")
    if dtype == "float32" and compute != "float32":
        raise ValueError("learner.compute_dtype = bfloat16 needs learner.dtype = bfloat16")
    if dtype == "bfloat16" and compute == "float32" and zero_stage == 3:
        raise ValueError("learner.compute_dtype = float32 with dtype bfloat16 works at zero_stage 0, 1 and 2, not 3")


def check_deepspeed(deepspeed: Mapping[str, Any], *, zero_stage: int) -> None:
    """Raises ValueError if `deepspeed` holds a key of `OWNED`, or offloads what cannot be offloaded."""
    for dotted, instead in OWNED.items():
        if _has(deepspeed, dotted.split(".")):
            raise ValueError(f"learner.deepspeed.{dotted} is not yours to set: {instead}")
    if (device := offloaded(deepspeed, "optimizer")) != "none" and zero_stage == 0:
        raise ValueError(
            f"learner.deepspeed.zero_optimization.offload_optimizer.device = {device} needs learner.zero_stage 1, 2 or 3; at 0 "
            "DeepSpeed passes over it without a word"
        )
    device = offloaded(deepspeed, "param")
    if device != "none" and zero_stage != 3:
        raise ValueError(
            f"learner.deepspeed.zero_optimization.offload_param.device = {device} needs learner.zero_stage = 3"
        )
    if device not in ("none", "cpu"):
        raise ValueError(
            f"learner.deepspeed.zero_optimization.offload_param.device = {device} is not supported: every version is "
            "published from the weights where they are; use cpu"
        )


def offloaded(deepspeed: Mapping[str, Any], what: str) -> str:
    """Where `what` ("optimizer" or "param") is kept by `learner.deepspeed`: "none", "cpu", "nvme" or what the user wrote."""
    at: Any = deepspeed
    for key in ("zero_optimization", f"offload_{what}", "device"):
        if not isinstance(at, Mapping) or key not in at:
            return "none"
        at = at[key]
    return str(at)


def _has(tree: Mapping[str, Any], path: list[str]) -> bool:
    for key in path:
        if not isinstance(tree, Mapping) or key not in tree:
            return False
        tree = tree[key]
    return True
