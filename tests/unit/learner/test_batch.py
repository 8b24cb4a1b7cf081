from dataclasses import fields, replace

import numpy as np
import pytest

from anabranch.learner.batch import TrainBatch, build_batch
from anabranch.learner.step import StepShare, plan_step
from anabranch.schemas.config import CorrectionSection
from anabranch.schemas.errors import AnabranchError, TrajectoryError
from anabranch.schemas.trajectory import Group, Rollout
from anabranch.schemas.versions import PolicyVersion, VersionSpan

NOW = PolicyVersion(1, 5)


def rollout(sample: int, tokens: list[int], spans: list[tuple[int, int]], reward: float = 0.0) -> Rollout:
    return Rollout(
        sample, np.array(tokens, np.int32), -np.array(tokens, np.float32),
        tuple(VersionSpan(PolicyVersion(1, v), s) for v, s in spans), reward, "stop", "", 0, 0,
    )  # fmt: skip


def group(index: int, prompt: list[int], *rollouts: Rollout) -> Group:
    return Group("run", "east", "p", index, 0, np.array(prompt, np.int32), "", "", rollouts)


GROUPS = [
    group(7, [1, 2], rollout(1, [3], [(5, 0)], 1.0), rollout(0, [4, 5, 6], [(3, 0), (4, 1)])),
    group(2, [9], rollout(0, [8, 8], [(2, 0)], 0.5)),
]


def same(a: TrainBatch, b: TrainBatch) -> bool:
    return all(
        getattr(a, f.name).dtype == getattr(b, f.name).dtype and np.array_equal(getattr(a, f.name), getattr(b, f.name))
        for f in fields(TrainBatch)
    )


def test_rows_are_sorted_by_group_then_sample():
    batch = build_batch(GROUPS, now=NOW, forks={}, max_age=8)
    assert batch.group_indices.tolist() == [2, 7]
    assert batch.group.tolist() == [0, 1, 1]
    assert batch.token_ids.tolist() == [[9, 8, 8, 0, 0], [1, 2, 4, 5, 6], [1, 2, 3, 0, 0]]
    assert batch.prompt_lengths.tolist() == [1, 2, 2]
    assert batch.lengths.tolist() == [2, 3, 1]
    assert batch.behaviour.tolist() == [[-8, -8, 0], [-4, -5, -6], [-3, 0, 0]]
    assert batch.ages.tolist() == [[3, 3, 0], [2, 1, 1], [0, 0, 0]]
    assert batch.rewards.tolist() == [0.5, 0.0, 1.0]
    assert (batch.token_ids.dtype, batch.behaviour.dtype) == (np.int64, np.float32)


def test_the_order_of_arrival_does_not_show():
    shuffled = [replace(g, rollouts=g.rollouts[::-1]) for g in GROUPS[::-1]]
    a, b = (build_batch(groups, now=NOW, forks={}, max_age=8) for groups in (GROUPS, shuffled))
    assert same(a, b)


def test_ages_are_counted_by_token_and_split_into_flight_and_queue():
    batch = build_batch(GROUPS, now=NOW, forks={}, max_age=8)
    assert batch.tokens == 6
    assert batch.age_histogram() == {0: 1, 1: 2, 2: 1, 3: 2}
    # Queue: group 2's newest policy is 3 old (2 tokens), group 7's is fresh. All ages sum to 10.
    assert batch.mean_ages() == pytest.approx((4 / 6, 6 / 6))


def test_bytes_bring_it_back():
    batch = build_batch(GROUPS, now=NOW, forks={}, max_age=8)
    assert same(TrainBatch.from_bytes(batch.to_bytes()), batch)


def test_a_token_beyond_the_bound_is_refused():
    build_batch(GROUPS, now=NOW, forks={}, max_age=3)
    with pytest.raises(AnabranchError, match=r"group 2 has age 3 at e1\.v5; the bound is 2"):
        build_batch(GROUPS, now=NOW, forks={}, max_age=2)


def test_a_token_from_the_future_is_refused():
    with pytest.raises(TrajectoryError, match="newer than the learner"):
        build_batch(GROUPS, now=PolicyVersion(1, 4), forks={}, max_age=8)


@pytest.mark.parametrize("groups", [[], [GROUPS[0], GROUPS[0]]])
def test_no_group_or_one_twice_is_refused(groups):
    with pytest.raises(TrajectoryError, match="distinct groups"):
        build_batch(groups, now=NOW, forks={}, max_age=8)


def test_a_group_sent_with_what_was_finished_weighs_by_its_rollouts():
    """Three of four rollouts, beside a whole group of four: each group's advantages are its own."""
    rewards = {0: [1.0, 0.0, 0.0, 1.0], 1: [1.0, 1.0, 0.0]}
    groups = [
        replace(group(i, [1], *(rollout(s, [7], [(5, 0)], r) for s, r in enumerate(rewards[i]))), group_size=4)
        for i in (0, 1)
    ]
    assert [g.partial for g in groups] == [False, True]
    batch = build_batch(groups, now=NOW, forks={}, max_age=8)
    assert batch.group.tolist() == [0] * 4 + [1] * 3
    (together,), (alone,) = (
        plan_step(of, CorrectionSection(advantage="rloo"), budget_tokens=100, ranks=1, max_tokens=None)
        for of in (batch, build_batch(groups[1:], now=NOW, forks={}, max_age=8))
    )
    assert advantages(together)[4:] == pytest.approx([0.5, 0.5, -1.0])
    assert advantages(together)[4:] == advantages(alone)
    assert advantages(together)[:4] == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert together.updates[0].facts.total_mass == pytest.approx(1.0), "seven rollouts of one token, not eight"


def advantages(share: StepShare) -> list[float]:
    """By rollout of the batch."""
    found = {
        int(row): float(a)
        for micro in share.updates[0].microbatches
        for row, a in zip(micro.rollouts, micro.advantages, strict=True)
    }
    return [found[row] for row in sorted(found)]
