"""Corrections that judge a trajectory as a whole: its ratio, or whether it takes part at all.

Invariant: with ℓ = b = p each of them has the gradient A·∇ℓ of plain policy gradient and keeps every token; and a trajectory's
terms depend on its own tokens alone, so it must not be cut. Held by tests/unit/kernels/test_identities.py; numbers worked by hand
in tests/unit/kernels/test_sequence_objectives.py.

Every function takes `Tokens` (flat [N]; float32 or float64) and returns a `TokenObjective` [N].
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from anabranch.kernels.corrections import LOG_RATIO_LIMIT, TokenObjective, clipped, log_ratio, weighted
from anabranch.kernels.tokens import Tokens
from anabranch.kernels.trust import mean_lag


def ratio_of(tokens: Tokens, numerator: Tensor, level: Literal["token", "sequence"]) -> Tensor:
    """exp(x − b) of each token, or of its trajectory exp(Σ(x − b)), [N], without gradient. `numerator`: x [N], ℓ or p.

    Both exponents are clamped to ±20, the sum as well as its terms.
    """
    with torch.no_grad():
        d = log_ratio(numerator, tokens.behaviour)
        if level == "sequence":
            d = tokens.spread(tokens.per_rollout(d).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        return d.exp()


def tis(tokens: Tokens, *, ratio_cap: float, level: Literal["token", "sequence"]) -> TokenObjective:
    """sg(min(exp(p − b), C)) · A · ℓ, truncated importance sampling (`tis`; Ionides 2008).

    The ratio is the token's or its trajectory's (`correction.ratio_level`). Defaults C 2 and 5. The token's has a bounded variance and
    a bias that grows with length; the trajectory's is unbiased but for the cap, and varies wildly on long ones: the
    literature has both.
    """
    weight = ratio_of(tokens, tokens.proximal, level).clamp(max=ratio_cap)
    return weighted(tokens, weight, torch.ones_like(weight, dtype=torch.bool))


def gspo(tokens: Tokens, *, clip_low: float | Tensor, clip_high: float | Tensor) -> TokenObjective:
    """min(sA, clip(s, 1 − ε₋, 1 + ε₊)·A) with the trajectory's s = exp(Σd/T), gradient through s (`gspo`; arXiv 2507.18071).

    Each token holds its trajectory's value; the gradient reaches all of its tokens alike, s·A·∇ℓ each. A trajectory is
    kept or clipped as a whole. Defaults ε₋ 3e-4, ε₊ 4e-4, with aggregation `seq_mean_token_mean`. Where the trust region narrows with
    lag, it does at the trajectory's mean lag.

    Args:
        clip_low, clip_high: a number, or [N] that is constant in each trajectory.
    """
    mean_d = tokens.spread(tokens.per_rollout(log_ratio(tokens.ell, tokens.behaviour)) / tokens.lengths)
    inner = clipped(mean_d, tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    with torch.no_grad():
        passes = ~((tokens.ell - tokens.behaviour).abs() > LOG_RATIO_LIMIT)
    return TokenObjective(inner.value, inner.kept & passes)


def seq_mis(
    tokens: Tokens,
    *,
    band_low: float,
    band_high: float,
    widening: float,
    form: Literal["product", "geometric"],
    ratio_cap: float,
) -> TokenObjective:
    """Trajectories whose ratio lies outside a band are masked, the others have sg(min(r, R)) · A · ℓ (`seq_mis`).

    Masking whole trajectories: Trust Region Masking, arXiv 2512.23075 (its v1 masks on the largest divergence of any token: here the
    ratio decides). `form`: the ratio is exp(Σd), or exp(Σd/T), which does not shrink the region with length. The band is
    [lo/(1 + w·lag), hi·(1 + w·lag)] at the trajectory's mean lag: it loosens with lag, so that old data is not all lost. Defaults lo 0.5,
    hi 2, w 0.1, geometric. The cap R (20) of token ratios inside is ours.
    """
    with torch.no_grad():
        d = log_ratio(tokens.ell, tokens.behaviour)
        exponent = tokens.per_rollout(d)
        if form == "geometric":
            exponent = exponent / tokens.lengths
        ratio = exponent.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        wider = 1 + widening * mean_lag(tokens)
        kept = tokens.spread(~((ratio < band_low / wider) | (ratio > band_high * wider)))
        weight = d.exp().clamp(max=ratio_cap)
    return weighted(tokens, weight, kept)


def opsm(tokens: Tokens, *, delta: float, clip_low: float | Tensor, clip_high: float | Tensor) -> TokenObjective:
    """PPO's clipped surrogate without the trajectories that have A < 0 and mean(b − ℓ) > δ (`opsm`).

    Off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556: a bad trajectory that the policy has left already teaches nothing but
    noise; a good one is worth returning to. Default δ 0.1 (ours), clip as in `ppo`. Where advantages of a trajectory's tokens differ
    (penalty `k1`), A is their mean.
    """
    inner = clipped(tokens.ell - tokens.behaviour, tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    with torch.no_grad():
        left = -tokens.per_rollout(log_ratio(tokens.ell, tokens.behaviour)) / tokens.lengths
        dropped = tokens.spread((tokens.per_rollout(tokens.advantages) < 0) & (left > delta))
    return TokenObjective(torch.where(dropped, torch.zeros_like(inner.value), inner.value), inner.kept & ~dropped)
