"""What an environment is: problems by index, and an exact score.

Invariant: an environment is a pure function of its configuration and seed. `prompt(i)` gives the same problem in
every process, so a group that is handed out again is the same group, and a reward is exactly 0.0 or 1.0. Held by
tests/unit/producers/test_environments.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. `question` is what identifies it, `prompt_text` what the model reads (before a chat template)."""

    question: str
    prompt_text: str
    answer: str  # the gold answer
    entry: Mapping[str, Any]  # what the environment's own scorer wants to see


class Environment(Protocol):
    """Problems and their scores; see the module's invariant."""

    def prompt(self, group_index: int, attempt: int = 0) -> Problem:
        """The training problem of `group_index` (0, 1, 2, …; no upper end). `attempt` counts up when the caller cannot
        use a problem (too long a prompt) and wants the next one of that index."""
        ...

    def heldout(self, index: int) -> Problem:
        """Held-out problem `index` of `task.heldout_size`; its question is never a training question.

        Raises:
            IndexError: outside 0..heldout_size-1.
        """
        ...

    def score(self, problem: Problem, text: str) -> float:
        """1.0 when `text` answers `problem` exactly, else 0.0.

        Raises:
            RewardError: the scorer failed or gave something that is not a finite number.
        """
        ...
