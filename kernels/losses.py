"""From token objectives to one loss, with denominators that are fixed before anything is masked or split.

Invariant: a token's weight depends on the whole batch alone, never on the microbatch or rank it lands in, nor on
which other tokens a trust region masks. So the loss is a plain weighted sum, and splitting a batch differently
gives the same gradient to rounding. Held by tests/unit/kernels/test_losses.py and
tests/unit/learner/test_step.py.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from anabranch.kernels.corrections import dppo_tv, log_ratio, policy_gradient, ppo_clip, veto
from anabranch.kernels.tokens import Tokens
from anabranch.schemas.config import CorrectionSection

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]


def token_weights(lengths: Tensor, aggregation: Aggregation, *, max_tokens: int | None = None) -> Tensor:
    """Weight of each token of a rollout in the loss of the whole batch, per rollout.

    With R rollouts of T_i tokens each:
    - `token_mean`: 1/Σ T_i (DAPO, arXiv 2503.14476, equation 12).
    - `seq_mean_token_mean`: 1/(R·T_i) (GRPO, arXiv 2402.03300, equation 3).
    - `seq_mean_token_sum`: 1/R.
    - `constant`: 1/(R·max_tokens) (Dr. GRPO, arXiv 2503.20783, section 3.2: a constant length for all).

    Args:
        lengths: int64 [R], completion tokens of every rollout of the batch, over all ranks and microbatches.
        max_tokens: the constant length; needed for `constant`.

    Returns:
        float64 [R].
    """
    n = lengths.numel()
    length = lengths.to(torch.float64)
    if aggregation == "token_mean":
        return torch.full_like(length, 1.0) / length.sum()
    if aggregation == "seq_mean_token_mean":
        return 1.0 / (n * length)
    if aggregation == "seq_mean_token_sum":
        return torch.full_like(length, 1.0 / n)
    if aggregation == "constant":
        if max_tokens is None:
            raise ValueError("aggregation 'constant' needs max_tokens")
        return torch.full_like(length, 1.0 / (n * max_tokens))
    raise ValueError(f"unknown aggregation {aggregation!r}")


def token_loss(tokens: Tokens, weights: Tensor, config: CorrectionSection) -> tuple[Tensor, Tensor]:
    """The loss of some rollouts of a batch, −Σ weight·(J − penalty·d²), and the tokens that carry gradient of J.

    The d² penalty pulls a drifted token back towards the behaviour policy, so it also acts on tokens that the
    trust region masks; a vetoed trajectory is out of both terms. Masked tokens keep their place in `weights`.

    Args:
        weights: [R], of the dtype of the tokens' floats; as `token_weights` of the whole batch.

    Returns:
        scalar loss with gradient; bool [N] of kept tokens.
    """
    ell, behaviour, advantages = tokens.ell, tokens.behaviour, tokens.advantages
    match config.objective:
        case "dppo_tv":
            objective = dppo_tv(ell, behaviour, advantages, tau=config.tau, ratio_cap=config.ratio_cap)
        case "grpo" | "dr_grpo":
            objective = ppo_clip(ell, behaviour, advantages, clip_low=config.clip_low, clip_high=config.clip_high)
        case "none":
            objective = policy_gradient(ell, advantages)
    in_loss = ~tokens.spread(veto(tokens, low=config.veto_low, high=config.veto_high))
    value = objective.value
    if config.penalty > 0:
        value = value - config.penalty * log_ratio(ell, behaviour).square()
    # where, not a product: whatever stands in a masked place, NaN included, must not reach the sum.
    summed = torch.where(in_loss, value, torch.zeros_like(value)) * tokens.spread(weights)
    return -summed.sum(), objective.kept & in_loss
