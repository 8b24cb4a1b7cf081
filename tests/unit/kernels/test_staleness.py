import numpy as np
import pytest

from anabranch.kernels.staleness import checked_age, queue_age, rollout_ages
from anabranch.schemas.errors import TrajectoryError
from anabranch.schemas.trajectory import Group, Rollout
from anabranch.schemas.versions import PolicyVersion, VersionSpan


def rollout(sample: int, tokens: int, spans: list[tuple[int, int, int]]) -> Rollout:
    """`spans`: (epoch, version, start)."""
    return Rollout(
        sample, np.zeros(tokens, np.int32), np.zeros(tokens, np.float32),
        tuple(VersionSpan(PolicyVersion(e, v), s) for e, v, s in spans), 0.0, "stop", "", 0, 0,
    )  # fmt: skip


def group(*rollouts: Rollout) -> Group:
    return Group("run", "east", "p", 0, 0, np.zeros(1, np.int32), "", "", rollouts)


def test_ages_follow_the_spans_of_each_rollout():
    swapped_twice = rollout(0, 6, [(1, 7, 0), (1, 8, 2), (1, 10, 5)])
    fresh = rollout(1, 2, [(1, 10, 0)])
    ages = [rollout_ages(r, PolicyVersion(1, 10), {}) for r in (swapped_twice, fresh)]
    assert [a.tolist() for a in ages] == [[3, 3, 2, 2, 2, 0], [0, 0]]
    assert all(a.dtype == np.int64 for a in ages)


def test_a_token_of_an_older_epoch_at_or_below_the_fork_is_on_our_own_line():
    # Epoch 2 began at version 20: version 18 of epoch 1 is an ancestor of version 23 of epoch 2.
    assert checked_age(PolicyVersion(1, 18), PolicyVersion(2, 23), {1: 0, 2: 20}) == 5
    assert checked_age(PolicyVersion(1, 20), PolicyVersion(2, 23), {1: 0, 2: 20}) == 3


def test_a_token_of_an_abandoned_branch_counts_back_to_the_fork_and_forward():
    # 24 of epoch 1 lies 4 updates beyond the fork, the learner 3: 7 updates separate them, not −1.
    assert checked_age(PolicyVersion(1, 24), PolicyVersion(2, 23), {1: 0, 2: 20}) == 7


@pytest.mark.parametrize("future", [PolicyVersion(2, 24), PolicyVersion(3, 20), PolicyVersion(3, 24)])
def test_a_token_from_the_future_is_refused(future: PolicyVersion):
    with pytest.raises(TrajectoryError, match=f"{future}.*newer than the learner's e2.v23"):
        checked_age(future, PolicyVersion(2, 23), {1: 0, 2: 20})


def test_queue_age_is_that_of_the_newest_policy_in_the_group():
    g = group(rollout(0, 3, [(1, 4, 0), (1, 6, 1)]), rollout(1, 3, [(1, 4, 0)]))
    assert queue_age(g, PolicyVersion(1, 9), {}) == 3
