"""Advantages: how much better a rollout did than others.

Invariant: rewards that give nothing to learn from give an advantage of exactly 0, not a rounding error. For every kind but
`reinforce_pp`, which compares over the whole batch, those are the groups whose rollouts all scored the same; `has_no_gradient`
names such groups for any kind. Held by tests/unit/kernels/test_advantages.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.schemas.config.correction import Advantage
from anabranch.schemas.errors import RewardError

EPSILON = 1e-6  # keeps (R − μ)/(σ + ε) finite for nearly equal rewards


def group_advantages(rewards: Tensor, group: Tensor, kind: Advantage, lengths: Tensor | None = None) -> Tensor:
    """Advantage of each rollout, over its own group except for `reinforce_pp`.

    μ and σ (of the population) are of the group; G is its size.

    - `grpo`: (R − μ)/(σ + ε) (DeepSeekMath, arXiv 2402.03300, section 4.1.2).
    - `dr_grpo`: R − μ, no division by σ, which weighs very easy and very hard prompts more (arXiv 2503.20783, section 3.2).
    - `rloo`: R minus the mean of the others, which is G/(G−1)·(R − μ) (arXiv 2402.14740, equation 8).
    - `reinforce_pp`: (R − μ_B)/(σ_B + ε) over all rollouts of the batch (REINFORCE++, arXiv 2501.03262). A prompt that all
      rollouts solve still pushes, up. The literature disagrees: implementations whiten over tokens, so that long rollouts count for
      more, and the paper's variant with a baseline takes μ off before; here a rollout counts once and only the batch is taken off.
    - `opo`: R − Σ T·R / Σ T, T the lengths: the baseline of least variance if the squared gradient of a rollout grows as its
      length (OPO, arXiv 2505.23585). Sums to 0 weighted by length.
    - `maxrl`: (R − μ)/μ (MaxRL, arXiv 2602.02710): the gradient of log(probability to succeed), to the order that G allows, instead of
      that of the probability: a prompt solved once in eight weighs eight times what it does in `dr_grpo`. Made for rewards of 0 and 1.

    Args:
        rewards: float64 [R].
        group: int64 [R], the rollout's group as 0..n−1; groups may differ in size.
        lengths: int64 [R], completion tokens; needed by `opo`.

    Returns:
        float64 [R]; exactly 0 where the rewards compared are equal.

    Raises:
        RewardError: `maxrl` with a reward below 0, for which it would point the wrong way.
        ValueError: `opo` without lengths; an unknown kind.
    """
    if kind == "reinforce_pp":
        batch = torch.zeros_like(group)  # one group
        return _over_groups(rewards, batch, "grpo", lengths)
    return _over_groups(rewards, group, kind, lengths)


def _over_groups(rewards: Tensor, group: Tensor, kind: Advantage, lengths: Tensor | None) -> Tensor:
    n = int(group.max()) + 1 if group.numel() else 0

    def mean(values: Tensor, weights: Tensor) -> Tensor:
        """Weighted mean over each group, [R] -> [groups]."""
        return _sums(values * weights, group, n) / _sums(weights, group, n)

    equally = torch.ones_like(rewards)
    mu = mean(rewards, equally)
    centred = rewards - mu[group]
    match kind:
        case "dr_grpo":
            advantages = centred
        case "grpo":
            advantages = centred / (mean(centred.square(), equally).sqrt() + EPSILON)[group]
        case "rloo":
            size = _sums(equally, group, n)
            advantages = centred * (size / (size - 1).clamp(min=1))[group]
        case "opo":
            if lengths is None:
                raise ValueError("advantage 'opo' needs lengths")
            advantages = rewards - mean(rewards, lengths.to(rewards.dtype))[group]
        case "maxrl":
            least = float(rewards.min()) if rewards.numel() else 0.0
            if least < 0:
                raise RewardError(
                    f"correction.advantage = maxrl is for rewards of at least 0, and a rollout of this batch has {least}; "
                    "choose another advantage"
                )
            advantages = centred / mu[group]
        case _:
            raise ValueError(f"unknown advantage {kind!r}")
    # A mean of equal numbers can be off by a rounding, and 0/0 is no number: those groups get a true zero.
    return torch.where(zero_variance(rewards, group)[group], torch.zeros_like(advantages), advantages)


def _sums(values: Tensor, group: Tensor, n: int) -> Tensor:
    return torch.zeros(n, dtype=values.dtype).index_add_(0, group, values)


def zero_variance(rewards: Tensor, group: Tensor) -> Tensor:
    """Which groups have equal rewards throughout. `rewards` float64 [R], `group` int64 [R] -> bool [groups]."""
    n = int(group.max()) + 1 if group.numel() else 0
    low = torch.full((n,), torch.inf, dtype=rewards.dtype).scatter_reduce_(0, group, rewards, "amin")
    high = torch.full((n,), -torch.inf, dtype=rewards.dtype).scatter_reduce_(0, group, rewards, "amax")
    return low == high


def has_no_gradient(rewards: Tensor, group: Tensor, kind: Advantage) -> Tensor:
    """Which groups may skip the forward pass, because all of their advantages are exactly 0: bool [groups].

    The groups of equal rewards, except for `reinforce_pp`: there they still are above or below the batch, and only a batch of equal
    rewards teaches nothing. Args as `group_advantages`.
    """
    if kind == "reinforce_pp":
        n = int(group.max()) + 1 if group.numel() else 0
        return zero_variance(rewards, torch.zeros_like(group)).expand(n) if n else torch.zeros(0, dtype=torch.bool)
    return zero_variance(rewards, group)
