import numpy as np
import pytest

from anabranch.learner.row_layout import RowLayout
from tests.unit.learner.conftest import make_batch

LAYOUTS = [RowLayout(), RowLayout(packing=True), RowLayout(packing=True, share_prompts=True)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["padded", "packed", "shared"])
@pytest.mark.parametrize(("budget", "ranks"), [(24, 1), (64, 3), (10**6, 2)])
def test_each_rollout_is_laid_out_once_and_ranks_have_equally_many(layout, budget, ranks):
    batch = make_batch()
    rows = [row for row in range(len(batch.rewards)) if row % 5]
    values = np.arange(len(batch.rewards), dtype=float)
    plan = layout.microbatches(batch, rows, values, values + 0.5, budget_tokens=budget, ranks=ranks)
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    real = [micro for rank in plan for micro in rank if micro.real]
    assert sorted(row for micro in real for row in micro.rollouts.tolist()) == rows
    for micro in real:
        assert micro.advantages.tolist() == values[micro.rollouts].tolist()
        assert micro.weights.tolist() == (values[micro.rollouts] + 0.5).tolist()
        assert micro.input_ids.size <= budget or len(micro.rollouts) == 1
        assert bool(len(micro.segments)) == layout.packing
    shared = any((micro.segments[:, 2] >= 0).any() for micro in real if len(micro.segments))
    assert shared == layout.share_prompts


def test_a_packed_row_has_no_padding_and_a_shared_prompt_is_there_once():
    batch = make_batch()
    rows, values = range(len(batch.rewards)), np.ones(len(batch.rewards))

    def positions(layout: RowLayout) -> int:
        ((micro,),) = layout.microbatches(batch, rows, values, values, budget_tokens=10**6, ranks=1)
        return micro.input_ids.size

    completions = int((batch.lengths - 1).sum())
    assert positions(LAYOUTS[1]) == int(batch.prompt_lengths.sum()) + completions
    assert positions(LAYOUTS[2]) == int(batch.prompt_lengths[::4].sum()) + completions
    assert positions(LAYOUTS[0]) > positions(LAYOUTS[1]) > positions(LAYOUTS[2])
