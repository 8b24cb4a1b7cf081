"""Policy age: how many optimizer updates lie between the policy that sampled a token and the learner's now.

Invariant: an age is never negative, and is 0 exactly for tokens sampled by the learner's present weights. Held by
tests/unit/kernels/test_staleness.py.

The distance itself, also across a learner's restart, is `schemas.versions.policy_age`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from anabranch.schemas.errors import TrajectoryError
from anabranch.schemas.trajectory import Group, Rollout
from anabranch.schemas.versions import Forks, PolicyVersion, policy_age


def checked_age(policy: PolicyVersion, now: PolicyVersion, forks: Forks) -> int:
    """`policy_age`, refusing a policy that `now` cannot have known.

    Raises:
        TrajectoryError: `policy` lies in the future of `now`.
    """
    age = policy_age(policy, now, forks)
    if age < 0 or policy.epoch > now.epoch:
        raise TrajectoryError(f"a token was sampled by {policy}, which is newer than the learner's {now}")
    return age


def rollout_ages(rollout: Rollout, now: PolicyVersion, forks: Forks) -> NDArray[np.int64]:
    """Age of each token of `rollout`, int64 [T]. Raises TrajectoryError as `checked_age`."""
    ends = [*(span.start for span in rollout.spans[1:]), len(rollout.token_ids)]
    ages = np.empty(len(rollout.token_ids), dtype=np.int64)
    for span, end in zip(rollout.spans, ends, strict=True):
        ages[span.start : end] = checked_age(span.policy, now, forks)
    return ages


def queue_age(group: Group, now: PolicyVersion, forks: Forks) -> int:
    """Age of the newest policy that worked on `group`: the part of its tokens' age that was gained *in the queue*,
    between the group's last token and training. The rest of a token's age was gained *in flight*."""
    return checked_age(max(group.policies), now, forks)
