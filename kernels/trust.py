"""What a token's lag does to its trust region and to its weight.

Invariant: a token of lag 0 has the whole region and the weight 1, and neither grows with lag. Held by
tests/unit/kernels/test_trust.py.

Both are this project's own, off by default and independent of each other, of the objective and of the hard bound
(`correction.max_age`). The other use of lag, the proximal policy of `a3po`, is `token_objectives.log_linear_proximal`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.kernels.tokens import Tokens


def narrowing(lags: Tensor, *, rate: float, start: int) -> Tensor:
    """1 / (1 + κ·max(0, lag − lag₀)): by what ε or τ is multiplied at a lag, so that ε(lag) = ε₀/(1 + κ·max(0, lag − lag₀)).

    Ours, not from a paper. Why: drift adds up over updates, so at the same distance from its behaviour policy an old token has
    used less of each update's region; narrowing asks the present update to move old tokens less. `seq_mis` does the opposite
    with a key of its own (`correction.band_widening`), so that old data is not all lost: there is no agreement on it.

    Args:
        lags: floating [any shape], of the dtype that the result shall have.
        rate: κ, `correction.narrow_rate`, default 0.1.
        start: lag₀, `correction.narrow_from`, default 0.
    """
    return 1 / (1 + rate * (lags - start).clamp(min=0))


def lag_weight(lags: Tensor, gamma: float, dtype: torch.dtype) -> Tensor:
    """γ^lag, [N] of `dtype`: what a token's term in the loss is multiplied by. Denominators stay as they are, so old tokens
    count for less and fresh ones for no more. Ours. `lags` int64 [N]; γ is `correction.age_weight`, default 1 (off)."""
    return torch.pow(gamma, lags.to(dtype))


def mean_lag(tokens: Tokens) -> Tensor:
    """Mean lag of each trajectory, [R] of the tokens' dtype: the lag that counts where a rule is of whole trajectories, because
    each token contributes alike to a trajectory's ratio."""
    return tokens.per_rollout(tokens.lags.to(tokens.ell.dtype)) / tokens.lengths
