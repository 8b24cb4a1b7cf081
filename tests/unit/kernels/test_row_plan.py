from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.kernels.row_plan import Costs, Lengths, cost_of, plan_rows, positions

COSTS = Costs(per_token=100.0, per_pair=1.0, per_target=20.0)
GROUPS = st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(1, 50), min_size=1, max_size=6)), max_size=10)


def rollouts(groups):
    return [Lengths(prompt, n, g) for g, (prompt, completions) in enumerate(groups) for n in completions]


def used(rows, micro, *, share, costs=COSTS):
    """Positions and cost of a microbatch, its groups' prompts counted once with `share`."""
    tokens = cost = 0
    for _, members in groupby(micro, key=lambda row: rows[row].group if share else row):
        lengths = [rows[row] for row in members]
        completions = [n.completion for n in lengths]
        tokens += positions(lengths[0].prompt, completions)
        cost += cost_of(lengths[0].prompt, completions, costs)
    return tokens, cost


@settings(max_examples=150, deadline=None)
@given(GROUPS, st.integers(16, 200), st.integers(1, 5), st.booleans())
def test_every_rollout_is_in_one_microbatch_ranks_have_equally_many_and_the_budget_holds(groups, budget, ranks, share):
    rows = rollouts(groups)
    plan = plan_rows(rows, budget_tokens=budget, ranks=ranks, costs=COSTS, share=share)
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) >= 1  # a step without rollouts is still one pass per rank
    assert sorted(row for rank in plan for micro in rank for row in micro) == list(range(len(rows)))
    for micro in (micro for rank in plan for micro in rank):
        assert micro == sorted(micro)
        assert len(micro) <= 1 or used(rows, micro, share=share)[0] <= budget
    assert plan == plan_rows(rows, budget_tokens=budget, ranks=ranks, costs=COSTS, share=share)


def test_a_shared_prompt_and_the_tokens_that_predict_nothing_are_counted_once_and_not_at_all():
    assert positions(10, [4]) == 13
    assert positions(10, [4, 4]) == 16
    # Pairs: 10·11/2 of the prompt, 3·10 with it and 3·4/2 of its own for each completion.
    assert cost_of(10, [4, 4], Costs(1.0, 10.0, 100.0)) == 16 + 10 * (55 + 2 * (30 + 6)) + 100 * 8


def test_a_group_stays_together_where_it_fits_and_is_split_where_it_does_not():
    rows = rollouts([(50, [11] * 4), (50, [11] * 4)])
    assert plan_rows(rows, budget_tokens=90, share=True) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert [len(micro) for micro in plan_rows(rows, budget_tokens=70, share=True)[0]] == [2] * 4
    assert plan_rows(rows, budget_tokens=200, share=True) == [[list(range(8))]]


def test_a_rank_that_would_have_nothing_to_do_gets_half_a_group():
    assert plan_rows(rollouts([(10, [5] * 4)]), budget_tokens=1000, ranks=2, share=True) == [[[0, 2]], [[1, 3]]]


def test_a_group_whose_rollouts_cost_nothing_is_halved_too():
    plan = plan_rows([Lengths(3, 1, 0)] * 2, budget_tokens=8, ranks=2, costs=Costs(per_token=0.0), share=True)
    assert sorted(rank[0] for rank in plan) == [[0], [1]]


def test_too_few_rollouts_leave_a_rank_an_empty_pass():
    assert plan_rows(rollouts([(10, [5])]), budget_tokens=1000, ranks=2) == [[[0]], [[]]]
    assert plan_rows([], budget_tokens=1000, ranks=2) == [[[]], [[]]]


def test_a_large_group_is_halved_where_ranks_would_wait_for_it():
    # One group costs more than all others: whole, its rank works three times as long as the other.
    plan = plan_rows(rollouts([(10, [40] * 8), (10, [40] * 2)]), budget_tokens=1000, ranks=2, costs=COSTS, share=True)
    assert sorted(len(rank[0]) for rank in plan) == [5, 5]


def log_normal(count: int, seed: int = 0) -> list[Lengths]:
    rng = np.random.default_rng(seed)
    completions = rng.lognormal(5.0, 1.0, count).clip(1, 4000).astype(int)
    return [Lengths(100, int(n), g) for g, n in enumerate(completions)]


def cost_table(rows, ranks: int, costs: Costs) -> np.ndarray:
    """[ranks, microbatches]."""
    plan = plan_rows(rows, budget_tokens=8192, ranks=ranks, costs=costs)
    return np.array([[used(rows, micro, share=False, costs=costs)[1] for micro in rank] for rank in plan])


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    "costs", [COSTS, Costs(per_token=3000.0, per_pair=1.0, per_target=500.0)], ids=["pairs", "tokens"]
)
def test_ranks_cost_the_same_on_a_log_normal_mix(ranks, costs):
    table = cost_table(log_normal(512), ranks, costs)
    assert table.sum(axis=1).max() <= 1.01 * table.sum(axis=1).mean()
    if costs is not COSTS:  # with them one long rollout costs as much as two other rows
        assert table.max(axis=0).sum() <= 1.02 * table.sum() / ranks


def test_less_than_a_twentieth_of_the_budget_is_left_over_on_a_log_normal_mix():
    rows = log_normal(512)
    for budget in (4096, 8192):
        (microbatches,) = plan_rows(rows, budget_tokens=budget, costs=COSTS)
        tokens = sum(used(rows, micro, share=False)[0] for micro in microbatches)
        assert tokens > 0.95 * budget * len(microbatches)
