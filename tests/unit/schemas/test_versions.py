from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.schemas.errors import TrajectoryError
from anabranch.schemas.versions import PolicyVersion, policy_age

POLICIES = st.builds(PolicyVersion, st.integers(0, 10**9 - 1), st.integers(0, 10**15 - 1))


@given(POLICIES)
def test_a_tag_names_one_version(policy: PolicyVersion) -> None:
    assert PolicyVersion.parse(str(policy)) == policy


@pytest.mark.parametrize(
    "tag", ["", "default", "v1", "e1.v", "e1v2", "e1.v2\n", " e1.v2", "e-1.v2", "e1.v2.3", "e1.v" + "9" * 16, "e١.v٢"]
)
def test_anything_else_is_not_a_tag(tag: str) -> None:
    with pytest.raises(TrajectoryError, match="not a policy version tag"):
        PolicyVersion.parse(tag)


def test_a_newer_epoch_is_newer_whatever_its_version() -> None:
    assert PolicyVersion(1, 99) < PolicyVersion(2, 0) < PolicyVersion(2, 1)


def test_age_counts_steps_inside_an_epoch() -> None:
    assert policy_age(PolicyVersion(1, 4), PolicyVersion(1, 9), {}) == 5
    assert policy_age(PolicyVersion(1, 9), PolicyVersion(1, 9), {}) == 0


def test_a_token_from_before_the_fork_lies_on_the_current_line() -> None:
    """Epoch 2 began at version 6 of epoch 1: versions up to 6 are its own past."""
    assert policy_age(PolicyVersion(1, 6), PolicyVersion(2, 6), {2: 6}) == 0
    assert policy_age(PolicyVersion(1, 4), PolicyVersion(2, 9), {2: 6}) == 5


def test_a_token_from_beyond_the_fork_goes_back_to_it_and_forward_again() -> None:
    """Versions 7 and 8 of epoch 1 were lost in the crash; epoch 2 took another way from 6 on."""
    assert policy_age(PolicyVersion(1, 8), PolicyVersion(2, 6), {2: 6}) == 2
    assert policy_age(PolicyVersion(1, 8), PolicyVersion(2, 8), {2: 6}) == 4, "same number, other weights: not age 0"


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_age_grows_with_now_and_is_never_negative(fork: int, ahead: int, sampled: int) -> None:
    age = policy_age(PolicyVersion(1, sampled), PolicyVersion(2, fork + ahead), {2: fork})
    assert age >= 0
    assert policy_age(PolicyVersion(1, sampled), PolicyVersion(2, fork + ahead + 1), {2: fork}) == age + 1


def test_two_crashes_close_together_count_every_fork_on_the_way() -> None:
    """Epoch 2 left epoch 1 at 55, epoch 3 left epoch 2 at 58: version 60 of epoch 1 is 5 + 3 steps away from 3's start."""
    forks = {1: 0, 2: 55, 3: 58}
    assert policy_age(PolicyVersion(1, 60), PolicyVersion(3, 58), forks) == 8
    assert policy_age(PolicyVersion(2, 60), PolicyVersion(3, 59), forks) == 3
    assert policy_age(PolicyVersion(1, 50), PolicyVersion(3, 59), forks) == 9


def test_an_epoch_that_left_no_checkpoint_is_not_needed_for_the_age() -> None:
    """Epoch 2 began at 55, went to 57 and died without a checkpoint; epoch 3 began at 55 again."""
    assert policy_age(PolicyVersion(2, 57), PolicyVersion(3, 56), {1: 0, 3: 55}) == 3
    assert policy_age(PolicyVersion(1, 60), PolicyVersion(3, 56), {1: 0, 3: 55}) == 6
