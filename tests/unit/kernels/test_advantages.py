from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch.kernels.advantages import group_advantages, has_no_gradient, zero_variance
from anabranch.schemas.config.correction import Advantage
from anabranch.schemas.errors import RewardError

KINDS = get_args(Advantage)
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
GROUP = torch.tensor([0, 0, 0, 0, 1, 1])


def test_dr_grpo_is_the_centred_reward():
    assert group_advantages(REWARDS, GROUP, "dr_grpo").tolist() == [0.5, -0.5, -0.5, 0.5, 0.5, -0.5]


def test_grpo_divides_by_the_population_standard_deviation():
    # Both groups have σ = 0.5.
    expected = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    torch.testing.assert_close(group_advantages(REWARDS, GROUP, "grpo"), expected, atol=3e-6, rtol=0)


def test_rloo_is_the_reward_minus_the_mean_of_the_others():
    # Group 0: 1 − (0+0+1)/3, 0 − (1+0+1)/3, ...; group 1: 1 − 0, 0 − 1.
    expected = torch.tensor([2 / 3, -2 / 3, -2 / 3, 2 / 3, 1.0, -1.0], dtype=torch.float64)
    torch.testing.assert_close(group_advantages(REWARDS, GROUP, "rloo"), expected)


def test_reinforce_pp_is_whitened_over_the_batch():
    # Rewards 1, 1, 0, 0, 0, 0 (μ 1/3, σ² = 1/3 − 1/9 = 2/9): (1 − 1/3)/0.4714 = √2, −(1/3)/0.4714 = −√½, whatever the groups.
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    expected = torch.tensor([2**0.5] * 2 + [-(0.5**0.5)] * 4, dtype=torch.float64)
    for group in ([0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2]):
        got = group_advantages(rewards, torch.tensor(group), "reinforce_pp")
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_opo_takes_off_the_mean_weighted_by_length():
    # Group 0: (1·10 + 0·20 + 0·30 + 1·40)/100 = 0.5; group 1: (1·10 + 0·30)/40 = 0.25.
    lengths = torch.tensor([10, 20, 30, 40, 10, 30])
    expected = [0.5, -0.5, -0.5, 0.5, 0.75, -0.25]
    assert group_advantages(REWARDS, GROUP, "opo", lengths).tolist() == pytest.approx(expected)
    with pytest.raises(ValueError, match="'opo' needs lengths"):
        group_advantages(REWARDS, GROUP, "opo")


def test_maxrl_divides_by_the_mean():
    # One success in four: (1 − ¼)/¼ = 3 and −1; one in two: 1 and −1.
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    assert group_advantages(rewards, GROUP, "maxrl").tolist() == [-1.0, 3.0, -1.0, -1.0, 1.0, -1.0]


def test_maxrl_refuses_rewards_below_zero():
    with pytest.raises(RewardError, match=r"rewards of at least 0, and a rollout of this batch has -0\.5"):
        group_advantages(REWARDS - 0.5, GROUP, "maxrl")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reinforce_pp"])
@pytest.mark.parametrize("reward", [0.1, 0.0])
def test_equal_rewards_give_exactly_zero(kind, reward):
    # 0.1 + 0.1 + 0.1 is not 0.3: a mean of equal numbers need not equal them.
    rewards = torch.tensor([reward, reward, reward, 5.0], dtype=torch.float64)
    group = torch.tensor([0, 0, 0, 1])
    lengths = torch.tensor([3, 7, 11, 5])
    assert group_advantages(rewards, group, kind, lengths).tolist() == [0.0] * 4  # nor has a group of one others
    assert zero_variance(rewards, group).tolist() == [True, True]
    assert has_no_gradient(rewards, group, kind).tolist() == [True, True]


def test_to_reinforce_pp_a_group_of_equal_rewards_says_something_unless_all_are_equal():
    rewards, group = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    advantages = group_advantages(rewards, group, "reinforce_pp")
    assert advantages.tolist() == pytest.approx([1, 1, -1, -1], abs=1e-5)
    assert has_no_gradient(rewards, group, "reinforce_pp").tolist() == [False, False]
    equal = torch.full((4,), 0.1, dtype=torch.float64)
    assert group_advantages(equal, group, "reinforce_pp").tolist() == [0.0] * 4
    assert has_no_gradient(equal, group, "reinforce_pp").tolist() == [True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_has_no_advantages(kind):
    nothing = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    assert group_advantages(*nothing, kind, torch.zeros(0, dtype=torch.int64)).numel() == 0
    assert has_no_gradient(*nothing, kind).numel() == 0


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.5, 1.0])), min_size=1, max_size=20),
    st.sampled_from(KINDS),
)
def test_a_group_that_may_be_skipped_has_no_advantage_and_any_other_has(rows, kind):
    labels = sorted({g for g, _ in rows})
    group = torch.tensor([labels.index(g) for g, _ in rows])
    rewards = torch.tensor([r for _, r in rows], dtype=torch.float64)
    advantages = group_advantages(rewards, group, kind, torch.arange(1, len(rows) + 1))
    skipped = has_no_gradient(rewards, group, kind)
    assert advantages.isfinite().all()
    assert (advantages[skipped[group]] == 0).all()
    if kind != "reinforce_pp":  # a group may score just what the batch does
        sums = torch.zeros(len(labels), dtype=torch.float64).index_add_(0, group, advantages.abs())
        assert torch.equal(sums == 0, skipped)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(-10, 10)), min_size=1, max_size=20),
    st.sampled_from(["grpo", "dr_grpo", "rloo"]),
    st.floats(-5, 5),
)
def test_advantages_sum_to_zero_in_each_group_and_ignore_a_shift(rows, kind, shift):
    labels = sorted({g for g, _ in rows})
    group = torch.tensor([labels.index(g) for g, _ in rows])
    rewards = torch.tensor([r for _, r in rows], dtype=torch.float64)
    advantages = group_advantages(rewards, group, kind)
    sums = torch.zeros(len(labels), dtype=torch.float64).index_add_(0, group, advantages)
    assert sums.abs().max() < 1e-6
    if kind != "grpo":  # at σ near ε the division magnifies the rounding of the shift
        torch.testing.assert_close(group_advantages(rewards + shift, group, kind), advantages, atol=1e-9, rtol=1e-9)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="unknown advantage 'x'"):
        group_advantages(REWARDS, GROUP, "x")
