"""Where the learner's loop is, and its status as it reports it. Plain data; held by tests/unit/learner/test_loop.py."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass

from anabranch.learner.ledger_watch import LedgerWatch
from anabranch.schemas.metrics import LearnerStatus
from anabranch.schemas.versions import PolicyVersion

SMOOTHING = 0.2  # of the reward that is compared with learner.target_reward


class LearnerState(enum.Enum):
    STARTING = "starting"
    EVALUATING = "evaluating"
    WAITING = "waiting for a batch"
    STEPPING = "stepping"
    PUBLISHING = "publishing"
    CHECKPOINTING = "checkpointing"
    STOPPED = "stopped"
    DONE = "done"


@dataclass(slots=True)
class Progress:
    epoch: int = 0
    version: int = 0
    fork_version: int = 0
    smoothed_reward: float | None = None

    @property
    def policy(self) -> PolicyVersion:
        return PolicyVersion(self.epoch, self.version)

    def saw_reward(self, mean: float) -> None:
        """Of a step's batch."""
        before = self.smoothed_reward
        self.smoothed_reward = mean if before is None else before + SMOOTHING * (mean - before)

    def reached(self, target: float | None) -> bool:
        """Whether there is a target reward, and the smoothed one is there."""
        return target is not None and self.smoothed_reward is not None and self.smoothed_reward >= target


def learner_status(
    progress: Progress,
    state: LearnerState,
    waiting_for: str,
    *,
    step: int,
    steps_total: int,
    watch: LedgerWatch,
    trouble: str,
) -> LearnerStatus:
    """`trouble`: of the fate log, '' if there is none."""
    return LearnerStatus(
        updated_ms=time.time_ns() // 1_000_000,
        state=state.value,
        waiting_for=waiting_for,
        step=step,
        steps_total=steps_total,
        epoch=progress.epoch,
        version=progress.version,
        regions=watch.regions(),
        ledger=watch.ledger(),
        alarms=(*watch.alarms(), *filter(None, [trouble])),
        notes=watch.notes(),
    )
