"""The registry: which function a name in `correction.objective` stands for, with what of the configuration.

Invariant: every name of the configuration has its function, and what a step must prepare for it (a proximal policy, a selection
over the whole batch) is told here and nowhere else. Held by tests/unit/kernels/test_objectives.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

import torch
from torch import Tensor

from anabranch.kernels import sequence_objectives as sequence
from anabranch.kernels import token_objectives as token
from anabranch.kernels.corrections import TokenObjective, log_ratio
from anabranch.kernels.tokens import Tokens
from anabranch.kernels.trust import mean_lag, narrowing
from anabranch.schemas.config import CorrectionSection

_READS_PROXIMAL = {"decoupled", "tis", "icepop"}


def needs_proximal(config: CorrectionSection, updates: int) -> bool:
    """Whether a step of `updates` optimizer updates needs the log-probs of all its tokens before the first of them, as
    `Tokens.proximal`. With one update they are the policy's own, unless something is selected by them."""
    return needs_selection(config) or (updates > 1 and config.objective in _READS_PROXIMAL)


def needs_selection(config: CorrectionSection) -> bool:
    """Whether the objective wants `Tokens.selected`: `selection` over the whole batch."""
    return config.objective == "m2po"


def squared_drift(tokens: Tokens, config: CorrectionSection) -> Tensor:
    """What `selection` goes by, [N], without gradient: d² = (p − b)², times what a region of that lag is narrower by."""
    with torch.no_grad():
        d_squared = log_ratio(tokens.proximal, tokens.behaviour).square()
        return d_squared / _narrowing(tokens, config)


def selection(d_squared: Tensor, config: CorrectionSection) -> Tensor:
    """`Tokens.selected` of a whole batch, bool [N]. `d_squared`: `squared_drift` of every token, over all ranks, in any
    order: the selection is a function of the values."""
    if not needs_selection(config):
        raise ValueError(f"correction.objective = {config.objective} selects nothing")
    return token.m2po_selection(d_squared, config.tau)


def objective_of(tokens: Tokens, config: CorrectionSection) -> TokenObjective:
    """The configured objective of each token, before penalty, veto and weights."""
    narrow = _narrowing(tokens, config)
    clip_low, clip_high = config.clip_low * narrow, config.clip_high * narrow
    match config.objective:
        case "none":
            return token.policy_gradient(tokens)
        case "ppo" | "grpo" | "dr_grpo":
            return token.ppo(tokens, clip_low=clip_low, clip_high=clip_high)
        case "decoupled":
            return token.decoupled(tokens, clip_low=clip_low, clip_high=clip_high, ratio_cap=config.ratio_cap)
        case "a3po":
            anchored = replace(tokens, proximal=token.log_linear_proximal(tokens))
            return token.decoupled(anchored, clip_low=clip_low, clip_high=clip_high, ratio_cap=config.ratio_cap)
        case "tis":
            return sequence.tis(tokens, ratio_cap=config.ratio_cap, level=config.ratio_level)
        case "icepop":
            return token.icepop(tokens, band_low=config.band_low, band_high=config.band_high)
        case "seq_mis":
            return sequence.seq_mis(
                tokens, band_low=config.band_low, band_high=config.band_high, widening=config.band_widening,
                form=config.sequence_ratio, ratio_cap=config.ratio_cap,
            )  # fmt: skip
        case "cispo" | "aipo":
            return token.capped(tokens, ratio_cap=config.ratio_cap)
        case "dppo_tv":
            return token.dppo_tv(tokens, tau=config.tau * narrow, ratio_cap=config.ratio_cap)
        case "dppo_kl":
            return token.dppo_kl(tokens, tau=config.tau * narrow, ratio_cap=config.ratio_cap)
        case "gspo":
            return sequence.gspo(tokens, clip_low=clip_low, clip_high=clip_high)
        case "m2po":
            return token.m2po(tokens)
        case "opsm":
            return sequence.opsm(tokens, delta=config.opsm_delta, clip_low=clip_low, clip_high=clip_high)
        case "topr":
            return token.topr(tokens, sequence.ratio_of(tokens, tokens.ell, config.ratio_level))
    assert_never(config.objective)


def _narrowing(tokens: Tokens, config: CorrectionSection) -> float | Tensor:
    """By what the trust region of each token is multiplied, 1 or [N]: at its own lag, for `gspo` at its trajectory's mean."""
    if not config.narrow_with_age:
        return 1.0
    rate, start = config.narrow_rate, config.narrow_from
    if config.objective == "gspo":
        return tokens.spread(narrowing(mean_lag(tokens), rate=rate, start=start))
    return narrowing(tokens.lags.to(tokens.ell.dtype), rate=rate, start=start)
