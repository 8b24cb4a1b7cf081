"""The DeepSpeed JSON, generated from `LearnerSection`; the user's `learner.deepspeed` is merged over it.

Invariant: bf16 weights always have float32 masters and float32 gradient accumulation and reduction, at every ZeRO
stage; keys that would break what the learner promises (batch accounting, schedule, precision) are refused by name.
Held by tests/unit/learner/test_deepspeed_config.py.

How stage and dtype combine:
- float32: DeepSpeed as it is, stages 0–3.
- bfloat16, compute bfloat16, stages 1–3: DeepSpeed's own bf16 mode.
- bfloat16 otherwise (stage 0, or compute float32 at stages 0–2): DeepSpeed trains the float32 masters, and
  `policy.MasterWeights` rounds them for each forward pass. DeepSpeed 0.19.8 refuses bf16 with float32 accumulation at
  stage 0, and with bf16 accumulation it begins with a hidden zero-gradient step that shifts Adam's bias correction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anabranch.schemas.config import LearnerSection
from anabranch.schemas.errors import ConfigError

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


def compute_dtype(config: LearnerSection) -> str:
    """The dtype of forward and backward: as configured, else float32 on the CPU where that is possible (a CPU without
    bf16 instructions is ten times slower in bf16), else the dtype of the weights."""
    if config.compute_dtype is not None:
        return config.compute_dtype
    return "float32" if config.device == "cpu" and config.zero_stage < 3 else config.dtype


def uses_master_weights(config: LearnerSection) -> bool:
    """Whether the float32 masters are the model's parameters (`policy.MasterWeights`).

    Raises:
        ConfigError: a combination of dtypes and stage that is not supported.
    """
    compute = compute_dtype(config)
    if "float16" in (config.dtype, compute):
        raise ConfigError("learner: float16 needs loss scaling, which skips steps; use bfloat16 or float32")
    if config.dtype == "float32":
        if compute != "float32":
            raise ConfigError("learner.compute_dtype = bfloat16 needs learner.dtype = bfloat16")
        return False
    if compute == "float32" and config.zero_stage == 3:
        raise ConfigError("learner.compute_dtype = float32 with dtype bfloat16 works at zero_stage 0, 1 and 2, not 3")
    return config.zero_stage == 0 or compute == "float32"


def deepspeed_json(config: LearnerSection) -> dict[str, Any]:
    """The configuration for `deepspeed.initialize`. Raises ConfigError for a key of `OWNED`, or an impossible mix."""
    masters = uses_master_weights(config)
    generated: dict[str, Any] = {
        # One optimizer step per `engine.step()`, whatever number of backward passes came before it.
        "managed_gradient_accumulation": False,
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": 1,
        # Stage 0: the engine clips itself, see `engine._Clipper`.
        "gradient_clipping": config.grad_clip if config.zero_stage else 0.0,
        "bf16": {"enabled": config.dtype == "bfloat16" and not masters},
        "data_types": {"grad_accum_dtype": "fp32"},
        # A sum over many ranks in bf16 would lose what the float32 accumulation kept.
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": config.zero_stage, "overlap_comm": False},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": config.lr,
                "betas": list(config.betas),
                "eps": config.eps,
                "weight_decay": config.weight_decay,
                "torch_adam": True,  # DeepSpeed's own Adam is compiled at first use, which takes minutes
            },
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
    }
    for dotted, instead in OWNED.items():
        if _has(config.deepspeed, dotted.split(".")):
            raise ConfigError(f"learner.deepspeed.{dotted} is not yours to set: {instead}")
    return _merge(generated, config.deepspeed)


def _has(tree: Mapping[str, Any], path: list[str]) -> bool:
    for key in path:
        if not isinstance(tree, Mapping) or key not in tree:
            return False
        tree = tree[key]
    return True


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
