"""Off-policy corrections: what one token contributes to the objective, given how far the policies have drifted.

Symbols: `ell` ℓ, log-prob under the policy being trained (carries the gradient); `behaviour` b, log-prob recorded
when the token was sampled; `advantage` A; d = ℓ − b; r = exp(clamp(d, −20, 20)). Objectives are maximised.

Invariant: at lag 0 (ℓ = b) r is 1, nothing is masked, and every objective here has the gradient A·∇ℓ of plain
policy gradient. Held by tests/unit/kernels/test_corrections.py.

`grpo` and `dr_grpo` share `ppo_clip`; they differ in the advantage, the aggregation and the penalty that the
configuration gives them by default (schemas/config: `CorrectionSection`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from anabranch.kernels.tokens import Tokens

LOG_RATIO_LIMIT = 20.0  # e^20 = 4.9e8: beyond it a ratio says "far", and float32 sums stay finite


class TokenObjective(NamedTuple):
    """`value`, the shape of its inputs: the objective, with gradient. `kept`, bool: tokens whose gradient survives."""

    value: Tensor
    kept: Tensor


def log_ratio(ell: Tensor, behaviour: Tensor) -> Tensor:
    """d = ℓ − b, clamped to ±`LOG_RATIO_LIMIT`. Any shape; float32 or float64."""
    return (ell - behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def policy_gradient(ell: Tensor, advantage: Tensor) -> TokenObjective:
    """A·ℓ, no correction (REINFORCE; Williams 1992). The baseline the others are compared with."""
    return TokenObjective(advantage * ell, torch.ones_like(ell, dtype=torch.bool))


def dppo_tv(ell: Tensor, behaviour: Tensor, advantage: Tensor, *, tau: float, ratio_cap: float) -> TokenObjective:
    """keep · sg(min(r, R)) · A · ℓ with a trust region on the change of probability (arXiv 2602.04879, TV form).

    Δ = e^ℓ − e^b. A token is kept if the update does not push it further out: A > 0 and Δ ≤ τ, or A ≤ 0 and
    Δ ≥ −τ. Unlike a clip on r, the region does not punish rare tokens, whose ratio is large at a tiny Δ.

    Args:
        ell, behaviour, advantage: one shape, float32 or float64.
        tau: τ, bound on |Δ|, a probability.
        ratio_cap: R, cap of the importance ratio.
    """
    with torch.no_grad():
        delta = ell.exp() - behaviour.exp()
        kept = torch.where(advantage > 0, delta <= tau, delta >= -tau)
        weight = log_ratio(ell, behaviour).exp().clamp(max=ratio_cap) * kept
    return TokenObjective(weight * advantage * ell, kept)


def ppo_clip(ell: Tensor, behaviour: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float) -> TokenObjective:
    """min(rA, clip(r, 1 − ε₋, 1 + ε₊)A), anchored on the behaviour policy.

    PPO (arXiv 1707.06347, equation 7); the upper clip may differ from the lower (DAPO, arXiv 2503.14476, equation 10).

    Args:
        ell, behaviour, advantage: one shape, float32 or float64.
    """
    ratio = log_ratio(ell, behaviour).exp()
    value = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    with torch.no_grad():
        clipped = torch.where(advantage > 0, ratio > 1 + clip_high, ratio < 1 - clip_low)
    return TokenObjective(value, ~clipped)


def veto(tokens: Tokens, *, low: float, high: float) -> Tensor:
    """Trajectories with any token ratio outside [low, high]: evidence that something other than drift is wrong
    (another tokenizer, stale KV, a corrupt entry), so the whole trajectory is dropped from the loss.

    Returns:
        bool [R], true where vetoed.
    """
    with torch.no_grad():
        ratio = log_ratio(tokens.ell, tokens.behaviour).exp()
        outside = (ratio < low) | (ratio > high)
        return tokens.per_rollout(outside.to(ratio.dtype)) > 0
