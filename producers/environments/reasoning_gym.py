"""Problems from reasoning-gym's procedural generators, scored by its own scorers.

Invariant: a problem is a function of (task configuration, seed, index, attempt) alone; no held-out question is ever a
training question (a training index that falls on one moves on, deterministically); a score is exactly 0.0 or 1.0, 1.0
only for what the scorer calls exactly right (some give partial credit for a gold answer inside a longer text). Held
by tests/unit/producers/test_environments.py.
"""

from __future__ import annotations

import difflib
import math
import re
from typing import Any

from anabranch.producers.environments.base import Problem
from anabranch.schemas.config import TaskSection
from anabranch.schemas.errors import ConfigError, TrajectoryError

SIZE = 2**62  # generators are lazy: an index is only a seed
HELDOUT_OFFSET = 2**61  # held-out problems come from the far half of the index space
ATTEMPT_STRIDE = 2**40
MAX_ATTEMPTS = 1000


class Task:
    """Raises ConfigError if `config` names an unknown dataset, wrong parameters or a broken pattern."""

    def __init__(self, config: TaskSection, seed: int) -> None:
        self._config = config
        self._dataset = _create(config, seed)
        self._answer = _pattern("task.answer_pattern", config.answer_pattern)
        self._question = _pattern("task.question_pattern", config.question_pattern)
        self._heldout = [self._problem(HELDOUT_OFFSET + i) for i in range(config.heldout_size)]
        self._reserved = {problem.question for problem in self._heldout}

    def prompt(self, group_index: int, attempt: int = 0) -> Problem:
        """The training problem of `group_index`; `attempt` counts up if the caller cannot use one (too long)."""
        skipped = 0
        for stride in range(MAX_ATTEMPTS):
            problem = self._problem(group_index + stride * ATTEMPT_STRIDE)
            if problem.question in self._reserved:
                continue
            if skipped == attempt:
                return problem
            skipped += 1
        raise ConfigError(
            f"task.dataset {self._config.dataset}: {MAX_ATTEMPTS} problems in a row are held out or unusable; "
            "lower task.heldout_size or widen task.params"
        )

    def heldout(self, index: int) -> Problem:
        """Held-out problem 0 ≤ `index` < task.heldout_size; the set may hold a question twice."""
        return self._heldout[index]

    def score(self, problem: Problem, text: str) -> float:
        """1.0 or 0.0. Raises TrajectoryError if the scorer fails or gives something that is not a finite number."""
        answer = text.strip()
        if self._answer is not None:
            match = self._answer.search(text)
            if match is None:
                return 0.0
            answer = match[1].strip()
        try:
            score = float(self._dataset.score_answer(answer=answer, entry=problem.entry))
        except Exception as error:  # a scorer is foreign code: whatever it raises is its verdict on this text
            raise TrajectoryError(
                f"the scorer of {self._config.dataset} failed on {answer[:80]!r}: {type(error).__name__}: {error}"
            ) from error
        if not math.isfinite(score):
            raise TrajectoryError(f"the scorer of {self._config.dataset} gave {score} for {answer[:80]!r}")
        return 1.0 if score == 1.0 else 0.0

    def _problem(self, index: int) -> Problem:
        entry = self._dataset[index]
        question = str(entry["question"])
        if self._question is not None:
            match = self._question.search(question)
            if match is None:
                raise ConfigError(f"task.question_pattern does not match {question!r}")
            question = match[1]
        prompt = self._config.prompt.replace("{question}", question)
        return Problem(question, prompt, str(entry["answer"]), entry)


def _create(config: TaskSection, seed: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if config.dataset not in DATASETS:
        near = difflib.get_close_matches(config.dataset, DATASETS, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else "see reasoning-gym's list"
        raise ConfigError(f"task.dataset: reasoning-gym has no {config.dataset!r}; {hint}")
    try:
        return reasoning_gym.create_dataset(config.dataset, size=SIZE, seed=seed, **config.params)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"task.params of {config.dataset}: {error}") from error


def _pattern(key: str, pattern: str) -> re.Pattern[str] | None:
    if not pattern:
        return None
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"{key} is not a regular expression: {error}") from error
    if compiled.groups < 1:
        raise ConfigError(f"{key} needs a group, e.g. 'answer: (\\S+)'")
    return compiled
