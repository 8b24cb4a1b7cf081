"""The learning rate as a function of the step, so that a resumed run needs nothing but its step. Pure. Held by
tests/unit/learner/test_schedule.py."""

from __future__ import annotations

import math

from anabranch.schemas.config import LearnerSection


def learning_rate(step: int, learner: LearnerSection) -> float:
    """Learning rate of the update that leads to `step` (1, 2, ...): up in a line over `warmup_steps`, then constant, or down to
    `lr_end_ratio` of it at `steps`, in a line or along half a cosine; beyond `steps` it stays there."""
    if step <= learner.warmup_steps:
        return learner.lr * step / learner.warmup_steps
    if learner.lr_schedule == "constant":
        return learner.lr
    whole = learner.steps - learner.warmup_steps
    done = min(1.0, (step - learner.warmup_steps) / whole) if whole > 0 else 1.0
    left = 1.0 - done if learner.lr_schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return learner.lr * (learner.lr_end_ratio + (1.0 - learner.lr_end_ratio) * left)
