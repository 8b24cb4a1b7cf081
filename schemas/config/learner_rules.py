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


def check_deepspeed(deepspeed: Mapping[str, Any]) -> None:
    """Raises ValueError if `deepspeed` holds a key of `OWNED`."""
    for dotted, instead in OWNED.items():
        if _has(deepspeed, dotted.split(".")):
            raise ValueError(f"learner.deepspeed.{dotted} is not yours to set: {instead}")


def _has(tree: Mapping[str, Any], path: list[str]) -> bool:
    for key in path:
        if not isinstance(tree, Mapping) or key not in tree:
            return False
        tree = tree[key]
    return True
