"""The completion tokens of some rollouts as flat vectors: what every correction and diagnostic is a function of.

Invariant: the tokens of a rollout stand together, rollouts in order, nothing is padding; so a sum per rollout is a sum over
a stretch, and how rollouts share a forward pass (padded, packed, prompt shared) does not show here. Held by
tests/unit/kernels/test_tokens.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """N tokens of R rollouts. Floats are float32 or float64, one dtype throughout.

    `selected`: tokens that a rule over the *whole* batch lets into the objective (`m2po`); None if there is no such rule.
    """

    ell: Tensor  # [N], ℓ: log-prob under the policy being trained, carries the gradient
    behaviour: Tensor  # [N], b: log-prob recorded when the token was sampled
    proximal: Tensor  # [N], p: log-prob under the policy before the step's first update, without gradient
    advantages: Tensor  # [N], A of the token's rollout
    lags: Tensor  # int64 [N], the learner's version minus the version that sampled the token
    lengths: Tensor  # int64 [R], tokens of each rollout, at least 1; their sum is N
    selected: Tensor | None = None  # bool [N]

    def per_rollout(self, values: Tensor) -> Tensor:
        """Sums over each rollout, [N] -> [R], with gradient; the same order of additions whatever else is in the batch."""
        return torch.segment_reduce(values, "sum", lengths=self.lengths, unsafe=True)

    def spread(self, values: Tensor) -> Tensor:
        """A value per rollout to each of its tokens, [R] -> [N]."""
        return values.repeat_interleave(self.lengths)
