"""Policy versions: which weights sampled a token.

Invariant: `(epoch, version)` names one set of weights for the whole life of a run. `version` is the number
of optimizer steps behind the weights. A learner that (re)starts opens the next epoch at the version of its
checkpoint (0 for a fresh run), its *fork*; it never publishes under an older epoch again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from anabranch.schemas.errors import TrajectoryError

Forks = Mapping[int, int]  # epoch -> the version at which it began, for the epochs of one line

_TAG = re.compile(r"e([0-9]{1,9})\.v([0-9]{1,15})\Z")


@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    epoch: int
    version: int

    def __str__(self) -> str:
        """The tag an engine carries: `e1.v42`."""
        return f"e{self.epoch}.v{self.version}"

    @classmethod
    def parse(cls, tag: str) -> PolicyVersion:
        """Inverse of `str`. Raises TrajectoryError on anything else (vLLM's initial "default" included)."""
        match = _TAG.match(tag)
        if match is None:
            raise TrajectoryError(f"{tag!r} is not a policy version tag such as 'e1.v42'")
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens from `start` (index into the completion) to the next span's start were sampled by `policy`."""

    policy: PolicyVersion
    start: int


def policy_age(sampled: PolicyVersion, now: PolicyVersion, forks: Forks) -> int:
    """How many optimizer steps separate the policy that sampled from the policy `now`.

    `forks` are those of `now`'s line. A token sampled beyond the fork of a later epoch comes from a branch that was given
    up: its distance goes back to the fork and forward again, at every fork on the way. An epoch that `forks` does not
    know published nothing that a checkpoint came out of, and no later fork lies before its own.
    """
    at, aside = sampled.version, 0
    for epoch in sorted(forks):
        if sampled.epoch < epoch <= now.epoch and at > forks[epoch]:
            aside += at - forks[epoch]
            at = forks[epoch]
    return now.version - at + aside
