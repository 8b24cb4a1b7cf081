import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from anabranch.kernels.packing import pad_right, plan_microbatches

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


@given(LENGTHS, st.integers(16, 200), st.integers(1, 5))
def test_every_row_is_in_exactly_one_microbatch_and_ranks_have_equally_many(lengths, budget, ranks):
    plan = plan_microbatches(lengths, budget_tokens=budget, ranks=ranks)
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) >= 1  # a step without rows is still one pass per rank
    rows = [row for rank in plan for micro in rank for row in micro]
    assert sorted(rows) == list(range(len(lengths)))


@given(LENGTHS, st.integers(16, 200), st.integers(1, 5))
def test_the_budget_holds_unless_one_row_alone_exceeds_it(lengths, budget, ranks):
    for rank in plan_microbatches(lengths, budget_tokens=budget, ranks=ranks):
        for micro in rank:
            padded = len(micro) * max((lengths[row] for row in micro), default=0)
            assert padded <= budget or len(micro) == 1


def test_rows_of_like_length_go_together():
    # 9 + 8 padded to 18, 2 + 2 + 1 to 6; in the given order it would be 45.
    assert plan_microbatches([2, 9, 2, 8, 1], budget_tokens=20) == [[[1, 3], [0, 2, 4]]]


def test_an_odd_microbatch_is_halved_so_that_two_ranks_have_work():
    assert plan_microbatches([4, 4, 4, 4], budget_tokens=100, ranks=2) == [[[0, 1]], [[2, 3]]]


def test_too_few_rows_leave_a_rank_an_empty_pass():
    assert plan_microbatches([4], budget_tokens=100, ranks=2) == [[[0]], [[]]]
    assert plan_microbatches([], budget_tokens=100, ranks=2) == [[[]], [[]]]


def test_pad_right():
    padded = pad_right([np.array([1, 2, 3]), np.array([4])], np.int64)
    assert padded.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert pad_right([], np.float32).shape == (0, 0)
