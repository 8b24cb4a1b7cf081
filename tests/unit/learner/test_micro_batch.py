import numpy as np
import torch

from anabranch.learner import micro_batch
from tests.unit.learner.conftest import make_batch


def test_every_completion_token_is_predicted_from_its_predecessor():
    batch = make_batch()
    count = len(batch.rewards)
    rollouts = [3, 0, 7]
    micro = micro_batch.padded(batch, rollouts, np.arange(count, dtype=float), np.full(count, 0.5))
    assert micro.rollouts.tolist() == rollouts
    assert micro.real
    tokens = micro.tokens(torch.zeros(len(micro.targets)))
    assert tokens.advantages.tolist() == np.repeat(np.array(rollouts, float), micro.lengths).tolist()
    ends = np.cumsum(micro.lengths)
    for i, row in enumerate(rollouts):
        mine = slice(int(ends[i] - micro.lengths[i]), int(ends[i]))
        start, length = int(batch.prompt_lengths[row]), int(batch.lengths[row])
        at = i * micro.input_ids.shape[1] + np.arange(start - 1, start + length - 1)
        assert micro.predecessors[mine].tolist() == at.tolist()
        assert micro.targets[mine].tolist() == batch.token_ids[row, start : start + length].tolist()
        assert micro.behaviour[mine].tolist() == batch.behaviour[row, :length].tolist()
        assert micro.lags[mine].tolist() == batch.ages[row, :length].tolist()


def test_a_pass_without_rollouts_has_one_token_of_no_weight():
    batch = make_batch()
    count = len(batch.rewards)
    micro = micro_batch.padded(batch, [], np.ones(count), np.ones(count))
    assert not micro.real
    assert micro.lengths.tolist() == [1]
    assert micro.weights.tolist() == [0.0]
    assert len(micro.targets) == 1
