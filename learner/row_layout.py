"""How the rollouts of an update become microbatches: padded rows, or packed ones with or without shared prompts.

Invariant: the ways differ in what is computed together, not in what: each rollout's tokens, advantage and weight stand in
exactly one microbatch. Held by tests/unit/learner/test_row_layout.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.packing import plan_microbatches
from anabranch.kernels.row_plan import Costs, Lengths, plan_rows
from anabranch.learner import micro_batch
from anabranch.learner.batch import TrainBatch
from anabranch.learner.micro_batch import MicroBatch


@dataclass(frozen=True)
class RowLayout:
    """`packing`, `share_prompts`: as in the learner's section; sharing needs packing."""

    packing: bool = False
    share_prompts: bool = False
    costs: Costs = field(default_factory=Costs)

    def microbatches(
        self,
        batch: TrainBatch,
        rows: Sequence[int],
        advantages: NDArray[np.float64],
        weights: NDArray[np.float64],
        *,
        budget_tokens: int,
        ranks: int,
    ) -> list[list[MicroBatch]]:
        """Each rank's microbatches of `rows` (of `batch`), equally many.

        Args:
            advantages, weights: float64 [all rollouts of the batch].
            budget_tokens: positions of one microbatch.
        """
        lengths = [(int(batch.prompt_lengths[row]), int(batch.lengths[row]), int(batch.group[row])) for row in rows]
        if not self.packing:
            totals = [prompt + completion for prompt, completion, _ in lengths]
            plan = plan_microbatches(totals, budget_tokens=budget_tokens, ranks=ranks)
            return [
                [micro_batch.padded(batch, [rows[i] for i in part], advantages, weights) for part in rank]
                for rank in plan
            ]
        plan = plan_rows(
            [Lengths(*each) for each in lengths], budget_tokens=budget_tokens, ranks=ranks, costs=self.costs,
            share=self.share_prompts,
        )  # fmt: skip
        return [
            [
                micro_batch.packed(
                    batch, [rows[i] for i in part], advantages, weights, share_prompts=self.share_prompts
                )
                for part in rank
            ]
            for rank in plan
        ]
