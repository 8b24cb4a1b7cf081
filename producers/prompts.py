"""What is sampled: problems by index, and the seed of each completion.

Invariant: prompts and seeds are functions of the configuration and the index alone, whoever samples them and when.
Held by tests/e2e/test_synchronous.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import xxhash

from anabranch.producers.environments import Problem


class Prompts(Protocol):
    """The environment as the loop needs it: problems by index, their token ids, their score."""

    def training(self, group_index: int) -> tuple[Problem, Sequence[int]]: ...

    def heldout(self, index: int) -> tuple[Problem, Sequence[int]]: ...

    def score(self, problem: Problem, text: str) -> float: ...


def sample_seed(run_seed: int, kind: str, index: int, sample: int) -> int:
    """The seed of one completion: a function of its place in the run, not of who samples it or when."""
    return xxhash.xxh3_64_intdigest(f"{run_seed}/{kind}/{index}/{sample}".encode()) >> 1
