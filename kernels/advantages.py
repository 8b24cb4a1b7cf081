"""Advantages: how much better a rollout did than the others of its group.

Invariant: a group whose rollouts all scored the same has advantage exactly 0 everywhere, so it cannot move the
weights; `zero_variance` names those groups. Held by tests/unit/kernels/test_advantages.py.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Advantage = Literal["grpo", "dr_grpo", "rloo"]
GRPO_EPSILON = 1e-6  # keeps (R − μ)/(σ + ε) finite for nearly equal rewards


def group_advantages(rewards: Tensor, group: Tensor, kind: Advantage) -> Tensor:
    """Advantage of each rollout over its own group.

    - `grpo`: (R − μ)/(σ + ε), σ the population standard deviation (DeepSeekMath, arXiv 2402.03300, section 4.1.2).
    - `dr_grpo`: R − μ, no division by σ (arXiv 2503.20783, section 3.2).
    - `rloo`: R minus the mean of the others, which is G/(G−1)·(R − μ) (arXiv 2402.14740, equation 8).

    Args:
        rewards: float64 [R].
        group: int64 [R], the rollout's group as 0..n−1; groups may differ in size.

    Returns:
        float64 [R]; exactly 0 for groups of one rollout or of equal rewards.
    """
    n = int(group.max()) + 1 if group.numel() else 0
    size = torch.zeros(n, dtype=rewards.dtype).index_add_(0, group, torch.ones_like(rewards))
    mean = torch.zeros(n, dtype=rewards.dtype).index_add_(0, group, rewards) / size
    centred = rewards - mean[group]
    if kind == "grpo":
        variance = torch.zeros(n, dtype=rewards.dtype).index_add_(0, group, centred.square()) / size
        centred = centred / (variance.sqrt() + GRPO_EPSILON)[group]
    elif kind == "rloo":
        centred = centred * (size / (size - 1).clamp(min=1))[group]
    elif kind != "dr_grpo":
        raise ValueError(f"unknown advantage {kind!r}")
    # A mean of equal numbers can be off by a rounding: those groups get a true zero.
    return torch.where(zero_variance(rewards, group)[group], torch.zeros_like(centred), centred)


def zero_variance(rewards: Tensor, group: Tensor) -> Tensor:
    """Which groups have equal rewards throughout. `rewards` float64 [R], `group` int64 [R] -> bool [groups]."""
    n = int(group.max()) + 1 if group.numel() else 0
    low = torch.full((n,), torch.inf, dtype=rewards.dtype).scatter_reduce_(0, group, rewards, "amin")
    high = torch.full((n,), -torch.inf, dtype=rewards.dtype).scatter_reduce_(0, group, rewards, "amax")
    return low == high
