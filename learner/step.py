"""One optimizer step as arithmetic: from a batch to microbatches, and from log-probs to loss and diagnostics.

Invariant: what a token weighs is settled for the whole batch before it is split, so the gradient does not depend
on the split (to rounding), and not at all on the order in which groups arrived. Held by
tests/unit/learner/test_step.py.

Groups whose rollouts all scored the same have no gradient: they keep their place in the denominators, are counted,
and skip the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anabranch.kernels.advantages import group_advantages, zero_variance
from anabranch.kernels.diagnostics import Diagnostics, DiagnosticSums
from anabranch.kernels.losses import token_loss, token_weights
from anabranch.kernels.packing import plan_microbatches
from anabranch.learner.batch import TrainBatch
from anabranch.schemas.config import CorrectionSection


@dataclass(frozen=True)
class StepOutput:
    """What one step did."""

    step: int  # optimizer steps done, this one included
    loss: float
    grad_norm: float  # before clipping
    lr: float
    diagnostics: Diagnostics
    zero_variance_groups: tuple[int, ...]  # group indices without gradient
    groups: int

    @property
    def zero_advantage_fraction(self) -> float:
        return len(self.zero_variance_groups) / self.groups


@dataclass(frozen=True)
class StepPlan:
    """What is settled for the whole batch."""

    advantages: Tensor  # float64 [R]
    weights: Tensor  # float64 [R], weight of each token of a rollout in the loss
    total_mass: float  # Σ of the weight over all tokens
    zero_variance_groups: tuple[int, ...]
    microbatches: list[list[list[int]]]  # by rank: lists of rows; an empty list is a pass without rows


def plan_step(
    batch: TrainBatch, correction: CorrectionSection, *, budget_tokens: int, ranks: int, max_tokens: int | None
) -> StepPlan:
    """Advantages, weights and microbatches of `batch`. Every rank computes the same plan."""
    rewards, group = torch.from_numpy(batch.rewards), torch.from_numpy(batch.group)
    flat = zero_variance(rewards, group)
    weights = token_weights(torch.from_numpy(batch.lengths), correction.aggregation, max_tokens=max_tokens)
    rows = torch.nonzero(~flat[group]).squeeze(1).tolist()
    totals = batch.prompt_lengths + batch.lengths
    plan = plan_microbatches([int(totals[row]) for row in rows], budget_tokens=budget_tokens, ranks=ranks)
    return StepPlan(
        advantages=group_advantages(rewards, group, correction.advantage),
        weights=weights,
        total_mass=float((weights * torch.from_numpy(batch.lengths)).sum()),
        zero_variance_groups=tuple(batch.group_indices[flat.numpy()].tolist()),
        microbatches=[[[rows[i] for i in micro] for micro in rank] for rank in plan],
    )


@dataclass(frozen=True)
class MicroBatch:
    """B rollouts of one forward pass. N: completion tokens in it; C: longest completion."""

    input_ids: Tensor  # int64 [B, L]
    rows: Tensor  # int64 [N], where each token's predecessor stands
    columns: Tensor  # int64 [N]
    offsets: Tensor  # int64 [N], place of the token in its completion
    targets: Tensor  # int64 [N]
    mask: Tensor  # bool [B, C]
    behaviour: Tensor  # float32 [B, C]
    ages: Tensor  # int64 [B, C]
    advantages: Tensor  # float32 [B]
    weights: Tensor  # float32 [B]

    @classmethod
    def take(cls, batch: TrainBatch, plan: StepPlan, rows: list[int], device: torch.device) -> MicroBatch:
        """Rows of `batch`, trimmed to their longest. No rows: one token of weight 0, so that a rank with nothing to
        do takes part in the communication all the same."""
        chosen = np.array(rows or [0], dtype=np.int64)
        lengths, prompts = batch.lengths[chosen], batch.prompt_lengths[chosen]
        width, longest = int((lengths + prompts).max()), int(lengths.max())
        mask = np.arange(longest)[None, :] < lengths[:, None]
        row, offset = np.nonzero(mask)
        column = prompts[row] + offset - 1
        token_ids = batch.token_ids[chosen, :width]
        real = mask if rows else np.zeros_like(mask)
        arrays = {
            "input_ids": token_ids,
            "rows": row,
            "columns": column,
            "offsets": offset,
            "targets": token_ids[row, column + 1],
            "behaviour": batch.behaviour[chosen, :longest],
            "ages": batch.ages[chosen, :longest],
        }
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
        return cls(
            **{name: tensor.to(device) for name, tensor in tensors.items()},
            mask=torch.from_numpy(real).to(device),
            advantages=plan.advantages[torch.from_numpy(chosen)].float().to(device),
            weights=plan.weights[torch.from_numpy(chosen)].float().to(device),
        )

    def loss(self, logprobs: Tensor, entropy: Tensor, correction: CorrectionSection, sums: DiagnosticSums) -> Tensor:
        """This microbatch's share of the batch's loss, and its contribution to `sums`.

        Args:
            logprobs, entropy: float32 [N], in the order of `targets`.
        """
        where = (self.rows, self.offsets)
        ell = torch.zeros_like(self.behaviour).index_put(where, logprobs)
        loss, kept = token_loss(ell, self.behaviour, self.advantages, self.weights, self.mask, correction)
        with torch.no_grad():
            entropies = torch.zeros_like(self.behaviour).index_put(where, entropy)
            sums.add(ell, self.behaviour, self.mask, kept, self.weights, self.ages, entropies, loss)
        return loss
