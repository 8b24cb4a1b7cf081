"""What a forward pass tells of each rollout in it: the numbers of a step's record.

Invariant: looking changes nothing: the loss is computed a second time on a copy of the log-probs, so the graph, the weights
and every bit of the step are those of a step that nobody looks at. Held by tests/unit/learner/test_rollout_trace.py and
tests/e2e/test_step_records.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.kernels.corrections import log_ratio
from anabranch.kernels.losses import token_terms
from anabranch.learner.micro_batch import MicroBatch
from anabranch.schemas.config import CorrectionSection


@dataclass(frozen=True, slots=True, eq=False)
class RolloutTrace:
    """One rollout of T completion tokens. Meanings as in `schemas.step_record.ROLLOUT_SCHEMA`."""

    row: int  # of the batch
    advantage: float
    weight: float
    ratio_mean: float
    ratio_max: float
    kept_fraction: float
    loss_share: float
    logprob: NDArray[np.float32]  # [T]
    proximal: NDArray[np.float32] | None  # [T]; None: as `logprob`
    entropy: NDArray[np.float32]  # [T]
    factor: NDArray[np.float32] | None  # [T]; None: weight·advantage is 0
    kept: NDArray[np.bool_]  # [T]


def trace(
    micro: MicroBatch,
    logprobs: Tensor,
    entropy: Tensor,
    correction: CorrectionSection,
    *,
    proximal: Tensor | None = None,
    selected: Tensor | None = None,
) -> list[RolloutTrace]:
    """The rollouts of a microbatch, in its order; none of one that is not `real`.

    Args:
        logprobs, entropy, proximal, selected: as in `step.microbatch_loss`.
    """
    if not micro.real:
        return []
    ell = logprobs.detach().clone().requires_grad_()
    with torch.enable_grad():
        tokens = micro.tokens(ell, proximal, selected)
        terms, kept = token_terms(tokens, torch.from_numpy(micro.weights).to(ell.device), correction)
        (slope,) = torch.autograd.grad(terms.sum(), ell, allow_unused=True, materialize_grads=True)
    ratio = log_ratio(ell.detach(), tokens.behaviour).exp()
    columns = [_parts(x, micro) for x in (ell, entropy, slope, ratio, terms, kept)]
    proximals = None if proximal is None else _parts(proximal, micro)
    found = []
    for i, (own, spread, slopes, ratios, terms_of, kept_of) in enumerate(zip(*columns, strict=True)):
        advantage, weight = float(micro.advantages[i]), float(micro.weights[i])
        per_slope = weight * advantage
        found.append(
            RolloutTrace(
                row=int(micro.rollouts[i]),
                advantage=advantage,
                weight=weight,
                ratio_mean=float(ratios.mean(dtype=np.float64)),
                ratio_max=float(ratios.max()),
                kept_fraction=float(kept_of.mean()),
                loss_share=-float(terms_of.sum(dtype=np.float64)),
                logprob=own,
                proximal=None if proximals is None else proximals[i],
                entropy=spread,
                factor=(slopes / np.float32(per_slope)) if per_slope else None,
                kept=kept_of,
            )
        )
    return found


def _parts(values: Tensor, micro: MicroBatch) -> list[NDArray[np.generic]]:
    """[N] by rollout, on the CPU."""
    return np.split(values.detach().cpu().numpy(), np.cumsum(micro.lengths)[:-1])
