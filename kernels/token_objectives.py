"""Corrections that judge each token by itself: ratios that are clipped, capped or masked.

Invariant: with ℓ = b = p each of them has the gradient A·∇ℓ of plain policy gradient and keeps every token, whatever the lag.
Held by tests/unit/kernels/test_identities.py; numbers worked by hand in tests/unit/kernels/test_token_objectives.py.

Every function takes `Tokens` (flat [N]; float32 or float64) and returns a `TokenObjective` [N]. Regions and caps that may depend
on lag are a number or [N]. Equation numbers are given where this was checked against the paper.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.kernels.corrections import LOG_RATIO_LIMIT, TokenObjective, clipped, log_ratio, weighted
from anabranch.kernels.tokens import Tokens

_LEAST_GAP = 1e-8  # between a probability and 1, so that log(1 − probability) stays finite


def policy_gradient(tokens: Tokens) -> TokenObjective:
    """A·ℓ, no correction (`none`; REINFORCE, Williams 1992). The baseline that the others are compared with."""
    return TokenObjective(tokens.advantages * tokens.ell, torch.ones_like(tokens.ell, dtype=torch.bool))


def ppo(tokens: Tokens, *, clip_low: float | Tensor, clip_high: float | Tensor) -> TokenObjective:
    """min(rA, clip(r, 1 − ε₋, 1 + ε₊)·A), anchored on the behaviour policy (`ppo`, `grpo`, `dr_grpo`).

    PPO, arXiv 1707.06347, equation 7; the upper clip may differ from the lower (DAPO, arXiv 2503.14476, equation 10). Defaults
    ε₋ 0.2, ε₊ 0.28. `grpo` (arXiv 2402.03300) and `dr_grpo` (arXiv 2503.20783) differ from it by advantage and aggregation.
    The paper anchors on the policy before the step's first update; anchored on the behaviour policy, as here, old data uses up its
    region before training starts. `decoupled` separates the two.
    """
    return clipped(tokens.ell - tokens.behaviour, tokens.advantages, clip_low=clip_low, clip_high=clip_high)


def decoupled(
    tokens: Tokens, *, clip_low: float | Tensor, clip_high: float | Tensor, ratio_cap: float
) -> TokenObjective:
    """w · min(uA, clip(u, 1 − ε, 1 + ε)·A) with w = sg(min(exp(p − b), cap)) and u = exp(ℓ − p) (`decoupled`).

    AReaL, arXiv 2505.24298, after Hilton et al., arXiv 2110.00641: the correction for stale data (w) apart from the trust
    region (u), which lies around the policy before the step's first update. Defaults ε 0.2, cap 5. With one update per step
    ℓ = p, nothing is clipped and this is `tis`. The literature disagrees on the cap: AReaL's code leaves tokens above it out, here w
    is truncated, so that the kept mass does not depend on it.
    """
    inner = clipped(tokens.ell - tokens.proximal, tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    with torch.no_grad():
        weight = log_ratio(tokens.proximal, tokens.behaviour).exp().clamp(max=ratio_cap)
    return TokenObjective(weight * inner.value, inner.kept)


def log_linear_proximal(tokens: Tokens) -> Tensor:
    """p = b + α·sg(ℓ − b), α = 1 − 1/lag from lag 1 on and 0 below: `a3po`'s stand-in for the proximal policy, [N].

    A-3PO, arXiv 2512.06547: the proximal policy is one version behind the one in training, so it lies (lag − 1)/lag of the way
    from behaviour to policy; no forward pass is spent on it. `a3po` is `decoupled` with this p; at lag 0 and 1 p = b, which is `ppo`
    with the clip of `decoupled`. Lags are those of each token, not of its trajectory.
    """
    with torch.no_grad():
        alpha = 1 - 1 / tokens.lags.clamp(min=1).to(tokens.ell.dtype)
        return tokens.behaviour + alpha * log_ratio(tokens.ell, tokens.behaviour)


def icepop(tokens: Tokens, *, band_low: float, band_high: float) -> TokenObjective:
    """ρ · 1[α ≤ ρ ≤ β] · A · ℓ with ρ = sg(exp(p − b)) (`icepop`; Ring-1T, arXiv 2510.18855). Defaults α 0.5, β 5.

    Made for the mismatch of engine and learner: ρ compares them at the same weights in the paper; here it holds drift too. The
    paper multiplies PPO's clipped surrogate, this has A·ℓ instead, which is the same at one update per step. On the band the
    literature disagrees: INTELLECT-3 (arXiv 2512.16144) multiplies the ratio of the policy in training.
    """
    with torch.no_grad():
        weight = log_ratio(tokens.proximal, tokens.behaviour).exp()
        kept = ~((weight < band_low) | (weight > band_high))
    return weighted(tokens, weight, kept)


def capped(tokens: Tokens, *, ratio_cap: float) -> TokenObjective:
    """sg(min(r, cap)) · A · ℓ: every token keeps a gradient, no ratio counts for more than the cap (`cispo`, `aipo`).

    CISPO: MiniMax-M1, arXiv 2506.13585, sg(clip(r, 0, 1 + ε)), default 1 + ε = 6. AIPO: LlamaRL, arXiv 2505.24034, sg(min(r, δ)),
    default δ 2. The literature disagrees on how it fares: one paper builds on it, another reports a collapse; nothing stops a token
    from drifting further.
    """
    with torch.no_grad():
        weight = log_ratio(tokens.ell, tokens.behaviour).exp().clamp(max=ratio_cap)
    return weighted(tokens, weight, torch.ones_like(weight, dtype=torch.bool))


def dppo_tv(tokens: Tokens, *, tau: float | Tensor, ratio_cap: float) -> TokenObjective:
    """keep · sg(min(r, R)) · A · ℓ with a trust region on the change of probability (`dppo_tv`; arXiv 2602.04879, binary TV).

    Δ = e^ℓ − e^b. A token is kept if the update does not push it further out: A > 0 and Δ ≤ τ, or A ≤ 0 and
    Δ ≥ −τ. Unlike a clip on r, the region does not punish rare tokens, whose ratio is large at a tiny Δ. Defaults τ 0.2, R 20.
    """
    with torch.no_grad():
        delta = tokens.ell.exp() - tokens.behaviour.exp()
        kept = ~torch.where(tokens.advantages > 0, delta > tau, delta < -tau)
        weight = log_ratio(tokens.ell, tokens.behaviour).exp().clamp(max=ratio_cap)
    return weighted(tokens, weight, kept)


def dppo_kl(tokens: Tokens, *, tau: float | Tensor, ratio_cap: float) -> TokenObjective:
    """As `dppo_tv`, the region being a bound on the binary KL divergence (`dppo_kl`; arXiv 2602.04879, binary KL).

    KL of behaviour q = e^b to policy π = e^ℓ, over "this token or another": q·log(q/π) + (1 − q)·log((1 − q)/(1 − π)). Only outward:
    a token beyond τ is dropped if A > 0 and π > q, or A ≤ 0 and π < q. Defaults τ 0.05, R 20.
    """
    with torch.no_grad():
        d = log_ratio(tokens.ell, tokens.behaviour)
        rest_policy, rest_behaviour = _log_rest(tokens.ell), _log_rest(tokens.behaviour)
        q = tokens.behaviour.exp()
        divergence = (1 - q) * (rest_behaviour - rest_policy) - q * d
        outward = torch.where(tokens.advantages > 0, d > 0, d < 0)
        kept = ~(outward & (divergence > tau))
        weight = d.exp().clamp(max=ratio_cap)
    return weighted(tokens, weight, kept)


def _log_rest(logprob: Tensor) -> Tensor:
    """log(1 − e^x), the log-prob of all other tokens; finite also at x = 0."""
    return torch.log(-torch.expm1(logprob.clamp(max=-_LEAST_GAP)))


def m2po(tokens: Tokens) -> TokenObjective:
    """1[selected] · r · A, gradient through r (`m2po`; arXiv 2510.01161). `Tokens.selected` comes from `m2po_selection`.

    Raises:
        ValueError: the tokens carry no selection.
    """
    if tokens.selected is None:
        raise ValueError("m2po needs Tokens.selected, the selection over the whole batch (objectives.selection)")
    d = tokens.ell - tokens.behaviour
    value = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp() * tokens.advantages
    with torch.no_grad():
        kept = tokens.selected & ~(d.abs() > LOG_RATIO_LIMIT)
    return TokenObjective(torch.where(tokens.selected, value, torch.zeros_like(value)), kept)


def m2po_selection(d_squared: Tensor, tau: float) -> Tensor:
    """Which tokens m2po trains on: the largest d² are dropped until the mean of the kept lies below τ (arXiv 2510.01161).

    Tokens of equal d² are kept or dropped together, so the selection depends on the values alone, not on the order in which ranks
    and microbatches gave them. Default τ 0.04. Paper and published code disagree: the paper takes the moment over all tokens, as
    here; the code (Infini-AI-Lab/M2PO) over those that PPO could clip (A > 0 and r > 1, or A < 0 and r < 1), and clips instead of
    dropping.

    Args:
        d_squared: [N] of the *whole* batch, over all ranks. NaN is selected, so that the loss shows it.

    Returns:
        bool [N].
    """
    ascending = torch.sort(d_squared.double()).values  # NaN last
    count = torch.arange(1, len(ascending) + 1, dtype=torch.float64, device=d_squared.device)
    below = ascending.cumsum(0) / count < tau
    dropped = (~below).cumsum(0) > 0  # the first that does not fit and all after it
    no_bound = torch.full_like(ascending, torch.inf)
    bound = torch.where(dropped, ascending, no_bound)  # the least of them, without asking where it stands
    least = torch.cat([bound, no_bound.new_full((1,), torch.inf)]).nan_to_num(nan=torch.inf, posinf=torch.inf).amin()
    return ~(d_squared.double() >= least)


def topr(tokens: Tokens, ratio: Tensor) -> TokenObjective:
    """A > 0: A·ℓ; A < 0: sg(clip(r, 0, 1))·A·ℓ (`topr`; TOPR, arXiv 2503.14286).

    Good trajectories are imitated at full weight however old; bad ones are pushed away only as long as the policy still gives them
    weight. The paper's ratio is that of the trajectory, with `correction.ratio_level = "sequence"`; default is the token's.

    Args:
        ratio: r, [N], without gradient; as `sequence_objectives.ratio_of` gives it.
    """
    weight = torch.where(tokens.advantages > 0, torch.ones_like(ratio), ratio.clamp(max=1))
    return weighted(tokens, weight, torch.ones_like(weight, dtype=torch.bool))
