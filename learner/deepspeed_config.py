"""The DeepSpeed JSON, generated from `LearnerSection`; the user's `learner.deepspeed` is merged over it.

Invariant: bf16 weights always have float32 masters and float32 gradient accumulation and reduction, at every ZeRO
stage. What cannot work was refused when the section was built (schemas/config/learner_rules.py).
Held by tests/unit/learner/test_deepspeed_config.py and tests/unit/learner/test_offload.py.

How stage and dtype combine:
- float32: DeepSpeed as it is, stages 0–3.
- bfloat16, compute bfloat16, stages 1–3: DeepSpeed's own bf16 mode.
- bfloat16 otherwise (stage 0, or compute float32 at stages 0–2): DeepSpeed trains the float32 masters, and
  `policy.MasterWeights` rounds them for each forward pass. DeepSpeed 0.19.8 refuses bf16 with float32 accumulation at
  stage 0, and with bf16 accumulation it begins with a hidden zero-gradient step that shifts Adam's bias correction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pydantic

from anabranch.schemas.config import LearnerSection
from anabranch.schemas.errors import ConfigError


def compute_dtype(config: LearnerSection) -> str:
    """The dtype of forward and backward, see `learner_rules.compute_dtype`."""
    return config.resolved_compute_dtype


def uses_master_weights(config: LearnerSection) -> bool:
    """Whether the float32 masters are the model's parameters (`policy.MasterWeights`)."""
    if config.dtype == "float32":
        return False
    return config.zero_stage == 0 or compute_dtype(config) == "float32"


def deepspeed_json(config: LearnerSection) -> dict[str, Any]:
    """The configuration for `deepspeed.initialize`."""
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
        "zero_optimization": {"stage": config.zero_stage, "overlap_comm": False} | _buckets(config),
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
        "zero_force_ds_cpu_optimizer": False,  # offloaded states are torch's to step too, for the same reason
        "steps_per_print": None,
    }
    return _merge(generated, config.deepspeed)


@contextlib.contextmanager
def what_deepspeed_refuses() -> Iterator[None]:
    """Around `deepspeed.initialize`.

    Raises:
        ConfigError: DeepSpeed does not know a setting, or does not take its value.
    """
    try:
        yield
    except pydantic.ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ConfigError(f"DeepSpeed refuses a setting of learner.deepspeed ({error.title}): {said}") from error


def _buckets(config: LearnerSection) -> dict[str, int]:
    """On the CPU a bucket of 16M elements: DeepSpeed's 500M are 2 GB of address space for each stage-3 engine, which it keeps, and a
    process with many of them can start no other any more."""
    return {"reduce_bucket_size": 2**24} if config.device == "cpu" else {}


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
