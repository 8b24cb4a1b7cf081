"""A `reasoning-gym` dataset as an environment.

Invariant: a held-out question is never a training question, whatever the seed and however small the problem space.
The held-out set depends on `[task]` alone, so runs with different seeds are measured on the same problems. Training
problem g is the first candidate of a sequence fixed by (seed, g) that is not held out. A reward is 1.0 only where the
dataset's own scorer gives exactly 1.0 for the extracted answer: scorers give partial credit when the gold answer is a
substring of the given one ("17" inside "2217"), which is no answer. Held by tests/unit/producers/test_environments.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import math
import re
from functools import lru_cache
from typing import Any

from anabranch.producers.environments.base import Problem
from anabranch.schemas.config import TaskSection
from anabranch.schemas.errors import ConfigError, RewardError

# Some generators draw all their problems when they are built, others refuse an index beyond their size: problems come
# from datasets of this many, each with its own seed.
BLOCK = 1024
MAX_CANDIDATES = 1000
# These give other problems in every process, whatever their seed (they iterate over sets of strings).
NOT_DETERMINISTIC = frozenset({"ransom_note", "isomorphic_strings"})
OWN_PARAMS = frozenset({"seed", "size"})


class Task:
    """The environment of `config`, training problems drawn by `seed`.

    Raises:
        ConfigError: unknown dataset or parameter (the nearest known one is named), a value the generator refuses, a
            pattern that is no regular expression with a group, a problem space too small for the held-out set.
    """

    def __init__(self, config: TaskSection, seed: int) -> None:
        self._config = config
        self._question = _pattern("task.question_pattern", config.question_pattern)
        self._answer = _pattern("task.answer_pattern", config.answer_pattern)
        if "{question}" not in config.prompt:
            raise ConfigError(f"task.prompt: no {{question}} in the template {config.prompt!r}")
        _check(config)
        self._seed = seed
        self._block = lru_cache(maxsize=8)(self._build_block)
        self._scorer = self._block("held out", 0)
        self._heldout: list[Problem] = []
        self._heldout_questions: set[str] = set()
        self._draw_heldout()

    def prompt(self, group_index: int, attempt: int = 0) -> Problem:
        """The training problem of `group_index`, by (seed, group_index, attempt) alone. A caller that cannot use one
        (too long) asks with the next `attempt`.

        Raises:
            ConfigError: every candidate is held out: the problem space is too small.
        """
        usable = 0
        for candidate in range(MAX_CANDIDATES):
            problem = self._draw(f"train {self._seed} {candidate}", group_index)
            if problem.question in self._heldout_questions:
                continue
            if usable == attempt:
                return problem
            usable += 1
        raise self._too_small()

    def heldout(self, index: int) -> Problem:
        if not 0 <= index < len(self._heldout):
            raise IndexError(f"held-out problem {index} of {len(self._heldout)}")
        return self._heldout[index]

    def score(self, problem: Problem, text: str) -> float:
        answer = self.extract(text)
        if answer is None:
            return 0.0
        try:
            value = float(self._scorer.score_answer(answer, problem.entry))
        except Exception as error:
            raise RewardError(
                f"the scorer of {self._config.dataset} failed on the answer {answer[:200]!r} to "
                f"{problem.question[:200]!r}: {type(error).__name__}: {error}"
            ) from error
        if not math.isfinite(value):
            raise RewardError(
                f"the scorer of {self._config.dataset} gave {value} for the answer {answer[:200]!r} to "
                f"{problem.question[:200]!r}"
            )
        return 1.0 if value == 1.0 else 0.0

    def extract(self, text: str) -> str | None:
        """The answer in `text`: first group of `task.answer_pattern` (None: no match), or all of it, stripped."""
        if self._answer is None:
            return text.strip()
        match = self._answer.search(text)
        return None if match is None else (match.group(1) or "").strip()

    def _draw_heldout(self) -> None:
        """Distinct problems, from a stream of their own: no more candidates than `MAX_CANDIDATES` per problem."""
        for index in range(self._config.heldout_size * MAX_CANDIDATES):
            problem = self._draw("held out", index)
            if problem.question not in self._heldout_questions:
                self._heldout_questions.add(problem.question)
                self._heldout.append(problem)
                if len(self._heldout) == self._config.heldout_size:
                    return
        raise self._too_small()

    def _draw(self, stream: str, index: int) -> Problem:
        entry = self._block(stream, index // BLOCK)[index % BLOCK]
        question = str(entry["question"])
        if self._question is not None:
            match = self._question.search(question)
            if match is None:
                raise ConfigError(f"task.question_pattern {self._question.pattern!r} finds nothing in {question!r}")
            question = match.group(1)
        prompt = self._config.prompt.replace("{question}", question)
        return Problem(question, prompt, str(entry["answer"]), entry)

    def _build_block(self, stream: str, block: int) -> Any:
        # a hash, not seed + index: the generators add the index to the seed, so neighbouring seeds would overlap
        digest = hashlib.sha256(f"{self._config.dataset}/{stream}/{block}".encode()).digest()
        return _create(self._config, seed=int.from_bytes(digest[:4], "big") >> 1)

    def _too_small(self) -> ConfigError:
        return ConfigError(
            f"task.dataset {self._config.dataset} with {dict(self._config.params)} has too few different problems for "
            f"task.heldout_size = {self._config.heldout_size} and training; widen task.params or lower heldout_size"
        )


def _create(config: TaskSection, seed: int) -> Any:
    from reasoning_gym.factory import create_dataset

    try:
        return create_dataset(config.dataset, **config.params, seed=seed, size=BLOCK)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"task.params: {config.dataset} refuses {dict(config.params)}: {error}") from error


def _check(config: TaskSection) -> None:
    import reasoning_gym  # noqa: F401  registers its datasets
    from reasoning_gym.factory import DATASETS

    if config.dataset not in DATASETS:
        near = difflib.get_close_matches(config.dataset, DATASETS, n=1, cutoff=0.0)
        raise ConfigError(f"task.dataset: no reasoning-gym dataset {config.dataset!r}; did you mean {near[0]!r}?")
    if config.dataset in NOT_DETERMINISTIC:
        raise ConfigError(f"task.dataset: {config.dataset} gives other problems in every process; it cannot be used")
    known = [f.name for f in dataclasses.fields(DATASETS[config.dataset][1]) if f.name not in OWN_PARAMS]
    for name in config.params:
        if name in OWN_PARAMS:
            raise ConfigError(f"task.params.{name}: set by the run itself (run.seed, task.heldout_size)")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ConfigError(
                f"task.params: {config.dataset} has no parameter {name!r}"
                + (f"; did you mean {near[0]!r}?" if near else "; it takes none")
            )


def _pattern(key: str, text: str) -> re.Pattern[str] | None:
    """`text` compiled; None when empty."""
    if not text:
        return None
    try:
        pattern = re.compile(text, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"{key}: {text!r} is not a regular expression: {error}") from error
    if pattern.groups < 1:
        raise ConfigError(f"{key}: {text!r} has no group; write (…) around the part that counts")
    return pattern
