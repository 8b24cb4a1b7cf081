"""Where the learner's loop is. Plain data; held by tests/unit/learner/test_loop.py."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from anabranch.schemas.versions import PolicyVersion


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
