"""What all off-policy corrections are made of: the clamped log-ratio, the two forms of an objective, the outlier veto.

Symbols: `ell` ℓ, log-prob under the policy being trained (carries the gradient); `behaviour` b, log-prob recorded when the
token was sampled; `proximal` p, log-prob before the step's first update; `advantages` A; d = ℓ − b; r = exp(clamp(d, −20, 20)).
Objectives are maximised. An objective is either a weight without gradient times A·ℓ (`weighted`), or a clipped ratio times
A (`clipped`); both have the gradient (ratio)·A·∇ℓ where nothing is masked.

Invariant: `kept` is true exactly where the objective lets a gradient through, and a masked token is exactly 0 in value and
gradient whatever infinity it holds. NaN is never masked: masks are written as "is outside", which NaN is not, so a policy that
yields NaN makes the loss NaN and ends the step instead of training on less. Held by tests/unit/kernels/test_objectives.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from anabranch.kernels.tokens import Tokens

LOG_RATIO_LIMIT = 20.0  # e^20 = 4.9e8: beyond it a ratio says "far", and float32 sums stay finite


class TokenObjective(NamedTuple):
    """`value`, [N] of the tokens' dtype: the objective, with gradient. `kept`, bool [N]: tokens whose gradient survives."""

    value: Tensor
    kept: Tensor


def log_ratio(ell: Tensor, behaviour: Tensor) -> Tensor:
    """d = ℓ − b, clamped to ±`LOG_RATIO_LIMIT`. Any shape; float32 or float64."""
    return (ell - behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def weighted(tokens: Tokens, weight: Tensor, kept: Tensor) -> TokenObjective:
    """kept · sg(weight) · A · ℓ. `weight` [N] of the tokens' dtype, without gradient; `kept` bool [N]."""
    # Twice where: the first keeps what a masked weight holds out of the gradient, the second out of the value (0 · ∞ is NaN).
    weight = torch.where(kept, weight, torch.zeros_like(weight))
    value = weight * tokens.advantages * tokens.ell
    return TokenObjective(torch.where(kept, value, torch.zeros_like(value)), kept)


def clipped(
    log_ratios: Tensor, advantages: Tensor, *, clip_low: float | Tensor, clip_high: float | Tensor
) -> TokenObjective:
    """min(uA, clip(u, 1 − ε₋, 1 + ε₊)·A) with u = e^x clamped, PPO's pessimistic surrogate (arXiv 1707.06347, equation 7).

    Args:
        log_ratios: x [N], with gradient, not clamped.
        advantages: [N].
        clip_low, clip_high: ε₋ and ε₊; a number, or [N].
    """
    ratio = log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    upwards = advantages > 0
    bound = torch.where(upwards, (1 + clip_high) * advantages, (1 - clip_low) * advantages)
    with torch.no_grad():
        beyond = torch.where(upwards, ratio > 1 + clip_high, ratio < 1 - clip_low)
        kept = ~beyond & ~(log_ratios.abs() > LOG_RATIO_LIMIT)  # the clamp lets no gradient through
    return TokenObjective(torch.where(beyond, bound, ratio * advantages), kept)


def veto(tokens: Tokens, *, low: float, high: float) -> Tensor:
    """Trajectories with any token ratio r outside [low, high]: evidence that something other than drift is wrong
    (another tokenizer, stale KV, a corrupt entry), so the whole trajectory is dropped from the loss. Ours.

    Returns:
        bool [R], true where vetoed.
    """
    with torch.no_grad():
        ratio = log_ratio(tokens.ell, tokens.behaviour).exp()
        outside = (ratio < low) | (ratio > high)
        return tokens.per_rollout(outside.to(ratio.dtype)) > 0
