"""A step's optimizer updates on one rank: look ahead where an objective asks for it, forward and backward, gates, step.

Invariant: all ranks take the same way through an update: what is decided is decided on sums over all ranks. An update that a
gate stops has changed no bit of weights or optimizer state. Held by tests/unit/learner/test_update.py and
tests/e2e/test_learner_engine.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anabranch.kernels.diagnostics import Diagnostics, DiagnosticSums
from anabranch.kernels.objectives import needs_proximal, needs_selection, selection, squared_drift
from anabranch.learner.distribute import gather_vectors
from anabranch.learner.gates import Alarm, judge, non_finite, strongest
from anabranch.learner.micro_batch import MicroBatch
from anabranch.learner.step import StepShare, UpdateShare, microbatch_loss
from anabranch.learner.step_gate import StepGate
from anabranch.learner.step_observer import StepObserver
from anabranch.schemas.config import CorrectionSection, GateSection
from anabranch.schemas.errors import GateError


@dataclass(frozen=True)
class UpdateOutput:
    loss: float
    grad_norm: float  # before clipping
    diagnostics: Diagnostics
    alarms: tuple[Alarm, ...]
    applied: bool


@dataclass(frozen=True)
class _Ahead:
    """What was settled for a microbatch before the step's first update."""

    proximal: Tensor | None = None  # float32 [N]
    selected: Tensor | None = None  # bool [N]


class Updater:
    """Runs the updates of a step with a DeepSpeed engine."""

    def __init__(
        self,
        engine: Any,
        gate: StepGate,
        correction: CorrectionSection,
        gates: GateSection,
        *,
        world_size: int,
        device: torch.device,
        heartbeat: Callable[[], object],
    ) -> None:
        self._engine, self._gate = engine, gate
        self._correction, self._gates = correction, gates
        self._world_size, self._device, self._heartbeat = world_size, device, heartbeat

    def run(self, share: StepShare, *, step: int, observer: StepObserver | None = None) -> Iterator[UpdateOutput]:
        """One result per update of `share`, this rank's part of `step`. `observer` is told of every forward pass and of the end
        of every update, before an error too.

        Raises:
            GateError: a gate says stop. The update was not applied.
        """
        ahead = iter(
            self._look_ahead([micro for update in share.updates for micro in update.microbatches], len(share.updates))
        )
        moved = False
        for update in share.updates:
            known = [next(ahead) for _ in update.microbatches]
            output = self._update(update, known, step=step, judged=not moved, observer=observer)
            moved = moved or output.applied
            yield output

    def _update(
        self, update: UpdateShare, ahead: Sequence[_Ahead], *, step: int, judged: bool, observer: StepObserver | None
    ) -> UpdateOutput:
        """`judged`: whether drift has to pass the gates; once the step has moved the weights it is the step's own doing."""
        sums = DiagnosticSums(self._device)
        for micro, known in zip(update.microbatches, ahead, strict=True):
            self._heartbeat()
            logprobs, entropy = self._engine(*micro.model_inputs(self._device))
            loss = microbatch_loss(
                micro, logprobs, entropy, self._correction, sums, proximal=known.proximal, selected=known.selected
            )
            if observer is not None:
                observer.saw(micro, logprobs, entropy, known.proximal, known.selected)
            # DeepSpeed averages gradients over ranks; the loss is already a share of one global sum.
            self._engine.backward(loss * self._world_size)
        self._sum_over_ranks(sums)
        diagnostics, loss_value = sums.finish(total_mass=update.facts.total_mass)
        alarms = [*(judge(diagnostics, self._gates) if judged else []), *non_finite("loss", loss_value, self._gates)]
        self._gate.begin(closed=strongest(alarms) in ("skip", "stop"))
        self._engine.step()
        if not self._gate.closed:
            alarms += non_finite("grad_norm", self._gate.norm(), self._gates)
        output = UpdateOutput(loss_value, self._gate.norm(), diagnostics, tuple(alarms), self._gate.applied)
        if observer is not None:
            observer.ended(output.loss, output.grad_norm, applied=output.applied, alarms=alarms)
        if strongest(alarms) == "stop":
            stops = "; ".join(str(alarm) for alarm in alarms if alarm.action == "stop")
            raise GateError(
                f"step {step}, {update.facts}: {stops}. The update was not applied; the checkpoint before it still stands"
            )
        return output

    @torch.no_grad()
    def _look_ahead(self, microbatches: Sequence[MicroBatch], updates: int) -> list[_Ahead]:
        """A forward pass over the whole step before its first update, if the objective needs one."""
        choose = needs_selection(self._correction)
        if not choose and not needs_proximal(self._correction, updates):
            return [_Ahead() for _ in microbatches]
        proximals = []
        for micro in microbatches:
            self._heartbeat()
            logprobs, _ = self._engine(*micro.model_inputs(self._device))
            proximals.append(logprobs.detach())
        if not choose:
            return [_Ahead(p) for p in proximals]
        own = [
            squared_drift(micro.tokens(p), self._correction).double()
            for p, micro in zip(proximals, microbatches, strict=True)
            if micro.real
        ]
        mine, where = gather_vectors(
            torch.cat(own) if own else torch.empty(0, dtype=torch.float64, device=self._device)
        )
        chosen = selection(mine, self._correction)[where]
        rest = iter(chosen.split([len(part) for part in own]))
        return [_Ahead(p, next(rest) if micro.real else None) for p, micro in zip(proximals, microbatches, strict=True)]

    def _sum_over_ranks(self, sums: DiagnosticSums) -> None:
        if self._world_size > 1:
            torch.distributed.all_reduce(sums.sums)
            torch.distributed.all_reduce(sums.maxima, torch.distributed.ReduceOp.MAX)
