"""From token objectives to one loss, with denominators that are fixed before anything is masked or split.

Invariant: a token's weight depends on the whole batch alone, never on the microbatch or rank it lands in, nor on
which other tokens a trust region masks. So the loss is a plain weighted sum, and splitting a batch differently
gives the same gradient to rounding. Held by tests/unit/kernels/test_losses.py and
tests/unit/learner/test_step.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from anabranch.kernels.corrections import log_ratio, veto
from anabranch.kernels.objectives import objective_of
from anabranch.kernels.tokens import Tokens
from anabranch.kernels.trust import lag_weight
from anabranch.schemas.config import CorrectionSection
from anabranch.schemas.config.correction import Aggregation


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
    """The loss of some rollouts of a batch, −Σ `token_terms`, and the tokens that carry gradient of J.

    Args and second result: as `token_terms`.

    Returns:
        scalar loss with gradient; bool [N] of kept tokens.
    """
    terms, kept = token_terms(tokens, weights, config)
    return -terms.sum(), kept


def token_terms(tokens: Tokens, weights: Tensor, config: CorrectionSection) -> tuple[Tensor, Tensor]:
    """What each token adds to the objective, weight·γ^lag·(J − penalty), and the tokens that carry gradient of J.

    J is the configured objective (`objectives.objective_of`). The penalty pulls a drifted token back towards the behaviour
    policy, so it also acts on tokens that J masks; a vetoed trajectory is out of both terms. What is masked, and what γ^lag
    takes away, keeps its place in `weights`. Penalties, with c = `correction.penalty` and d = ℓ − b clamped:

    - `d2`: c·d², in the loss.
    - `k3`: c·(r − 1 − d), in the loss (Schulman, "Approximating KL divergence", 2020; GRPO, arXiv 2402.03300, equation 4, has it
      against a reference policy instead).
    - `k1`: A − c·sg(d) in the place of A, as if −c·log(π/b) of the token were part of its reward. So it obeys the
      objective's mask and ratio, unlike the other two (Composer 2, arXiv 2603.24477, against its reference policy). For `gspo`, whose
      ratio is the trajectory's, d is its mean; `opsm` goes by the sign of the trajectory's mean.

    Args:
        weights: [R], of the dtype of the tokens' floats; as `token_weights` of the whole batch.

    Returns:
        [N] with gradient; bool [N] of kept tokens.
    """
    in_loss = ~tokens.spread(veto(tokens, low=config.veto_low, high=config.veto_high))
    tokens = _only(tokens, in_loss)
    if config.penalty > 0 and config.penalty_kind == "k1":
        drift = log_ratio(tokens.ell.detach(), tokens.behaviour)
        if config.objective == "gspo":
            drift = tokens.spread(tokens.per_rollout(drift) / tokens.lengths)
        tokens = replace(tokens, advantages=tokens.advantages - config.penalty * drift)
    value, kept = objective_of(tokens, config)
    if config.penalty > 0 and config.penalty_kind != "k1":
        d = log_ratio(tokens.ell, tokens.behaviour)
        value = value - config.penalty * (d.square() if config.penalty_kind == "d2" else d.exp() - 1 - d)
    weight = tokens.spread(weights)
    if config.age_weight < 1:
        weight = weight * lag_weight(tokens.lags, config.age_weight, weight.dtype)
    return value * weight, kept & in_loss


def _only(tokens: Tokens, in_loss: Tensor) -> Tokens:
    """The same tokens, zeros where `in_loss` (bool [N], whole trajectories) is false: their terms, and the gradient of them, are 0
    whatever stands there, NaN included. Zeroing the terms alone would not do: 0 times NaN is NaN in the backward pass."""

    def kept(values: Tensor) -> Tensor:
        return torch.where(in_loss, values, torch.zeros_like(values))

    return replace(
        tokens, ell=kept(tokens.ell), behaviour=kept(tokens.behaviour), proximal=kept(tokens.proximal),
        advantages=kept(tokens.advantages),
    )  # fmt: skip
