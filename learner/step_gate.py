"""Whether a step's gradients reach the optimizer.

Invariant: while the gate is closed, `engine.step()` of DeepSpeed clears the gradients and changes no weight, no moment and no
step counter of the optimizer: all bits stay. Held by tests/unit/learner/test_update.py.

DeepSpeed has no call for "forget these gradients" that works at every stage; its step clears them at all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


class StepGate:
    """Stands between DeepSpeed's optimizer and the torch optimizer under it. At stage 0, where there is none between, it also
    clips by global norm, as DeepSpeed does without telling the norm."""

    def __init__(self, optimizer: Any, *, zero_stage: int, max_norm: float) -> None:
        """Args: optimizer: `engine.optimizer`; max_norm: used at stage 0 only, 0 is off."""
        self.closed = False
        self.applied = False  # whether the last step went through
        self._norm = math.nan
        self._zero, self._max_norm = zero_stage > 0, max_norm or math.inf
        self._zero_optimizer = optimizer if self._zero else None
        self._base: torch.optim.Optimizer = optimizer.optimizer if self._zero else optimizer
        self._apply: Callable[..., Any] = self._base.step
        self._base.step = self._step  # type: ignore[method-assign]

    def norm(self) -> float:
        """Global gradient norm of the last step, before clipping; not finite if the gradient was not."""
        if self._zero_optimizer is None:
            return self._norm
        norm = self._zero_optimizer._global_grad_norm
        return math.nan if norm is None else float(norm)

    def begin(self, *, closed: bool) -> None:
        """Before `engine.step()`."""
        self.closed, self.applied, self._norm = closed, False, math.nan

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        if self._zero_optimizer is None:
            parameters = [p for group in self._base.param_groups for p in group["params"]]
            self._norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._max_norm))
        if self.closed or not math.isfinite(self.norm()):
            return None
        self.applied = True
        return self._apply(*args, **kwargs)
