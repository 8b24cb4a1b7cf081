"""What is sampled: problems by index, and the seed of each completion.

Invariant: prompts and seeds are functions of the configuration and of a rollout's place in the run (index, sample, and
which attempt at either it is), whoever samples it and when. No two attempts share a seed: one that ran into its deadline is
not repeated token for token. Held by tests/e2e/test_synchronous.py and tests/unit/producers/test_running_groups.py.
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


def sample_seed(run_seed: int, kind: str, index: int, sample: int, *, attempt: int = 0, again: int = 0) -> int:
    """The seed of one completion: a function of its place in the run, not of who samples it or when. `attempt`: of the
    group, as its permit says; `again`: how often this rollout of that attempt was started before."""
    place = f"{run_seed}/{kind}/{index}/{sample}"
    if attempt or again:
        place += f"/{attempt}/{again}"
    return xxhash.xxh3_64_intdigest(place.encode()) >> 1
