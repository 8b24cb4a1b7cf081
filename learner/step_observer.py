"""What one rank sees of a step while it runs, kept until the step's record is written.

Invariant: an update that a gate refuses is seen as well as one that is applied. Held by tests/unit/learner/test_step_rows.py
and tests/e2e/test_step_records.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from anabranch.learner.gates import Alarm
from anabranch.learner.micro_batch import MicroBatch
from anabranch.learner.rollout_trace import RolloutTrace, trace
from anabranch.schemas.config import CorrectionSection
from anabranch.schemas.step_record import UpdateResult


@dataclass(frozen=True, slots=True)
class SeenUpdate:
    traces: list[RolloutTrace]
    result: UpdateResult
    alarms: tuple[str, ...]


class StepObserver:
    """`updates`: those that came to an end, in order."""

    def __init__(self, correction: CorrectionSection) -> None:
        self._correction = correction
        self._traces: list[RolloutTrace] = []
        self.updates: list[SeenUpdate] = []

    def saw(
        self, micro: MicroBatch, logprobs: Tensor, entropy: Tensor, proximal: Tensor | None, selected: Tensor | None
    ) -> None:
        """A forward pass of the update in progress; arguments as those of `trace`."""
        self._traces += trace(micro, logprobs, entropy, self._correction, proximal=proximal, selected=selected)

    def ended(self, loss: float, grad_norm: float, *, applied: bool, alarms: Sequence[Alarm]) -> None:
        """The update in progress is over."""
        result = UpdateResult.of(loss, grad_norm, applied=applied)
        self.updates.append(SeenUpdate(self._traces, result, tuple(map(str, alarms))))
        self._traces = []
