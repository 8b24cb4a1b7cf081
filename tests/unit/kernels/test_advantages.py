import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch.kernels.advantages import group_advantages, zero_variance

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


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_equal_rewards_give_exactly_zero(kind):
    # 0.1 + 0.1 + 0.1 is not 0.3: a mean of equal numbers need not equal them.
    rewards = torch.tensor([0.1, 0.1, 0.1, 5.0], dtype=torch.float64)
    group = torch.tensor([0, 0, 0, 1])
    assert group_advantages(rewards, group, kind).tolist() == [0.0] * 4  # a group of one has no others either
    assert zero_variance(rewards, group).tolist() == [True, True]


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
