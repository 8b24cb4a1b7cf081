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
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from anabranch.kernels.advantages import group_advantages, has_no_gradient
from anabranch.kernels.diagnostics import Diagnostics, DiagnosticSums
from anabranch.kernels.losses import token_loss, token_weights
from anabranch.learner import micro_batch
from anabranch.learner.batch import TrainBatch
from anabranch.learner.gates import Alarm
from anabranch.learner.micro_batch import MicroBatch
from anabranch.learner.row_layout import RowLayout
from anabranch.schemas.config import CorrectionSection

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class StepOutput:
    """What one step did."""

    step: int  # steps done, this one included
    loss: float  # of the first update, as are the other figures
    grad_norm: float  # before clipping
    lr: float
    diagnostics: Diagnostics
    zero_variance_groups: tuple[int, ...]  # group indices without gradient
    groups: int
    alarms: tuple[Alarm, ...] = ()
    skipped_groups: tuple[int, ...] = ()  # group indices whose update a gate kept from the weights

    @property
    def zero_advantage_fraction(self) -> float:
        return len(self.zero_variance_groups) / self.groups


@dataclass(frozen=True)
class UpdateFacts:
    """What every rank knows of the groups of one optimizer update."""

    group_indices: tuple[int, ...]
    zero_variance_groups: tuple[int, ...]
    total_mass: float  # Σ of the weight over all tokens

    def __str__(self) -> str:
        return f"groups {min(self.group_indices)}..{max(self.group_indices)}"


@dataclass(frozen=True)
class UpdateShare:
    """What one rank needs for an update: its microbatches alone."""

    facts: UpdateFacts
    microbatches: list[MicroBatch]

    def to_bytes(self) -> bytes:
        facts = json.dumps(asdict(self.facts)).encode()
        return _LENGTH.pack(len(facts)) + facts + micro_batch.to_bytes(self.microbatches)

    @classmethod
    def from_bytes(cls, data: bytes) -> UpdateShare:
        (size,) = _LENGTH.unpack_from(data)
        start = _LENGTH.size + size
        facts = json.loads(data[_LENGTH.size : start])
        facts["group_indices"] = tuple(facts["group_indices"])
        facts["zero_variance_groups"] = tuple(facts["zero_variance_groups"])
        return cls(UpdateFacts(**facts), micro_batch.from_bytes(data[start:]))


@dataclass(frozen=True)
class StepShare:
    """One rank's part of a step: its updates, in order."""

    updates: list[UpdateShare]

    def to_bytes(self) -> bytes:
        parts = [update.to_bytes() for update in self.updates]
        return b"".join(_LENGTH.pack(len(part)) + part for part in parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> StepShare:
        updates, at = [], 0
        while at < len(data):
            (size,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size + size
            updates.append(UpdateShare.from_bytes(data[at - size : at]))
        return cls(updates)


def plan_step(
    batch: TrainBatch,
    correction: CorrectionSection,
    *,
    budget_tokens: int,
    ranks: int,
    max_tokens: int | None,
    updates: int = 1,
    layout: RowLayout | None = None,
) -> list[StepShare]:
    """Advantages, weights and microbatches of `batch`, by rank. Its groups, in the order of their indices, are split evenly
    into `updates` (fewer if there are fewer groups); every rank has as many updates, and in each as many microbatches, laid
    out as `layout` says (default: padded)."""
    rewards, group = torch.from_numpy(batch.rewards), torch.from_numpy(batch.group)
    flat = has_no_gradient(rewards, group, correction.advantage)
    advantages = group_advantages(rewards, group, correction.advantage, torch.from_numpy(batch.lengths))
    layout = layout or RowLayout()
    shares: list[StepShare] = [StepShare([]) for _ in range(ranks)]
    for members in np.array_split(np.arange(len(batch.group_indices)), min(updates, len(batch.group_indices))):
        chosen = np.nonzero(np.isin(batch.group, members))[0]
        lengths = torch.from_numpy(batch.lengths[chosen])
        weights = np.zeros(len(batch.lengths))
        weights[chosen] = token_weights(lengths, correction.aggregation, max_tokens=max_tokens).numpy()
        facts = UpdateFacts(
            group_indices=tuple(batch.group_indices[members].tolist()),
            zero_variance_groups=tuple(batch.group_indices[members][flat.numpy()[members]].tolist()),
            total_mass=float((weights * batch.lengths).sum()),
        )
        rows = [int(row) for row in chosen if not flat[group[row]]]
        parts = layout.microbatches(batch, rows, advantages.numpy(), weights, budget_tokens=budget_tokens, ranks=ranks)
        for share, microbatches in zip(shares, parts, strict=True):
            share.updates.append(UpdateShare(facts, microbatches))
    return shares


def microbatch_loss(
    micro: MicroBatch,
    logprobs: Tensor,
    entropy: Tensor,
    correction: CorrectionSection,
    sums: DiagnosticSums,
    *,
    proximal: Tensor | None = None,
    selected: Tensor | None = None,
) -> Tensor:
    """A microbatch's share of the update's loss, and its contribution to `sums`.

    Args:
        logprobs, entropy: float32 [N], in the order of `micro.targets`.
        proximal, selected: see `Tokens`; `proximal` is `logprobs` if it is not given.
    """
    if not micro.real:
        return 0.0 * logprobs.sum()
    tokens = micro.tokens(logprobs, proximal, selected)
    weights = torch.from_numpy(micro.weights).to(logprobs.device)
    loss, kept = token_loss(tokens, weights, correction)
    sums.add(tokens, kept=kept, weights=weights, entropy=entropy, loss=loss)
    return loss
