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
    assert policy_age(PolicyVersion(1, 4), PolicyVersion(1, 9), 0) == 5
    assert policy_age(PolicyVersion(1, 9), PolicyVersion(1, 9), 0) == 0


def test_a_token_from_before_the_fork_lies_on_the_current_line() -> None:
    """Epoch 2 began at version 6 of epoch 1: versions up to 6 are its own past."""
    assert policy_age(PolicyVersion(1, 6), PolicyVersion(2, 6), 6) == 0
    assert policy_age(PolicyVersion(1, 4), PolicyVersion(2, 9), 6) == 5


def test_a_token_from_beyond_the_fork_goes_back_to_it_and_forward_again() -> None:
    """Versions 7 and 8 of epoch 1 were lost in the crash; epoch 2 took another way from 6 on."""
    assert policy_age(PolicyVersion(1, 8), PolicyVersion(2, 6), 6) == 2
    assert policy_age(PolicyVersion(1, 8), PolicyVersion(2, 8), 6) == 4, "same number, other weights: not age 0"


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_age_grows_with_now_and_is_never_negative(fork: int, ahead: int, sampled: int) -> None:
    age = policy_age(PolicyVersion(1, sampled), PolicyVersion(2, fork + ahead), fork)
    assert age >= 0
    assert policy_age(PolicyVersion(1, sampled), PolicyVersion(2, fork + ahead + 1), fork) == age + 1
