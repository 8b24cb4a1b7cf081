"""One optimizer step as arithmetic: from a batch to each rank's share of it, and from log-probs to loss and diagnostics.

Invariant: what a token weighs is settled for the whole batch before it is split, so the gradient does not depend
on the split (to rounding), and not at all on the order in which groups arrived. Held by
tests/unit/learner/test_step.py.

Groups whose rollouts all scored the same have no gradient: they keep their place in the denominators, are counted,
and skip the forward pass.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from anabranch.kernels.advantages import group_advantages, zero_variance
from anabranch.kernels.diagnostics import Diagnostics, DiagnosticSums
from anabranch.kernels.losses import token_loss, token_weights
from anabranch.kernels.packing import plan_microbatches
from anabranch.learner import micro_batch
from anabranch.learner.batch import TrainBatch
from anabranch.learner.micro_batch import MicroBatch
from anabranch.schemas.config import CorrectionSection

_LENGTH = struct.Struct("<Q")


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
class BatchFacts:
    """What every rank knows of the whole batch."""

    groups: int
    first_group: int
    last_group: int
    total_mass: float  # Σ of the weight over all tokens
    zero_variance_groups: tuple[int, ...]

    def __str__(self) -> str:
        return f"groups {self.first_group}..{self.last_group}"


@dataclass(frozen=True)
class StepShare:
    """What one rank needs for a step: its microbatches alone."""

    facts: BatchFacts
    microbatches: list[MicroBatch]

    def to_bytes(self) -> bytes:
        facts = json.dumps(asdict(self.facts)).encode()
        return _LENGTH.pack(len(facts)) + facts + micro_batch.to_bytes(self.microbatches)

    @classmethod
    def from_bytes(cls, data: bytes) -> StepShare:
        (size,) = _LENGTH.unpack_from(data)
        start = _LENGTH.size + size
        facts = json.loads(data[_LENGTH.size : start])
        facts["zero_variance_groups"] = tuple(facts["zero_variance_groups"])
        return cls(BatchFacts(**facts), micro_batch.from_bytes(data[start:]))


def plan_step(
    batch: TrainBatch, correction: CorrectionSection, *, budget_tokens: int, ranks: int, max_tokens: int | None
) -> list[StepShare]:
    """Advantages, weights and microbatches of `batch`, by rank; every rank has as many microbatches."""
    rewards, group = torch.from_numpy(batch.rewards), torch.from_numpy(batch.group)
    flat = zero_variance(rewards, group)
    weights = token_weights(torch.from_numpy(batch.lengths), correction.aggregation, max_tokens=max_tokens)
    advantages = group_advantages(rewards, group, correction.advantage)
    facts = BatchFacts(
        groups=len(batch.group_indices),
        first_group=int(batch.group_indices.min()),
        last_group=int(batch.group_indices.max()),
        total_mass=float((weights * torch.from_numpy(batch.lengths)).sum()),
        zero_variance_groups=tuple(batch.group_indices[flat.numpy()].tolist()),
    )
    rows = torch.nonzero(~flat[group]).squeeze(1).tolist()
    totals = batch.prompt_lengths + batch.lengths
    plan = plan_microbatches([int(totals[row]) for row in rows], budget_tokens=budget_tokens, ranks=ranks)

    def lay_out(micro: Sequence[int]) -> MicroBatch:
        return micro_batch.padded(batch, [rows[i] for i in micro], advantages.numpy(), weights.numpy())

    return [StepShare(facts, [lay_out(micro) for micro in rank]) for rank in plan]


def microbatch_loss(
    micro: MicroBatch, logprobs: Tensor, entropy: Tensor, correction: CorrectionSection, sums: DiagnosticSums
) -> Tensor:
    """A microbatch's share of the batch's loss, and its contribution to `sums`.

    Args:
        logprobs, entropy: float32 [N], in the order of `micro.targets`.
    """
    if not micro.real:
        return 0.0 * logprobs.sum()
    tokens = micro.tokens(logprobs)
    weights = torch.from_numpy(micro.weights).to(logprobs.device)
    loss, kept = token_loss(tokens, weights, correction)
    sums.add(tokens, kept=kept, weights=weights, entropy=entropy, loss=loss)
    return loss
