import numpy as np
import pytest
import torch

from anabranch.learner import micro_batch
from anabranch.learner.micro_batch import MicroBatch
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


def test_packed_rollouts_stand_one_after_the_other_without_their_last_token():
    batch = make_batch()
    count = len(batch.rewards)
    rollouts = [0, 3, 7]
    micro = micro_batch.packed(batch, rollouts, np.arange(count, dtype=float), np.full(count, 0.5), share_prompts=False)
    at = 0
    for (start, length, parent), row in zip(micro.segments.tolist(), rollouts, strict=True):
        used = int(batch.prompt_lengths[row] + batch.lengths[row]) - 1
        assert (start, length, parent) == (at, used, -1)
        assert micro.input_ids[0, at : at + used].tolist() == batch.token_ids[row, :used].tolist()
        assert micro.position_ids[0, at : at + used].tolist() == list(range(used))
        at += used
    assert micro.input_ids.shape == (1, at)
    assert_the_same_but_for_places(
        micro, micro_batch.padded(batch, rollouts, np.arange(count, dtype=float), np.full(count, 0.5))
    )


def test_rollouts_of_a_group_stand_after_one_prompt():
    batch = make_batch([0, 1])
    count = len(batch.rewards)
    rollouts = [1, 2, 3, 4]  # three of the first group, one of the second
    micro = micro_batch.packed(batch, rollouts, np.ones(count), np.ones(count), share_prompts=True)
    prompt = int(batch.prompt_lengths[0])
    lengths = [int(n) - 1 for n in batch.lengths[[1, 2, 3]]]
    starts = [prompt, prompt + lengths[0], prompt + lengths[0] + lengths[1]]
    alone = [sum(lengths) + prompt, int(batch.prompt_lengths[4] + batch.lengths[4]) - 1, -1]
    assert micro.segments.tolist() == [
        [0, prompt, -1], *([s, n, 0] for s, n in zip(starts, lengths, strict=True)), alone
    ]  # fmt: skip
    assert micro.position_ids[0, starts[1] : starts[2]].tolist() == list(range(prompt, prompt + lengths[1]))
    first = np.cumsum([0, *micro.lengths[:-1]])
    # The first token of each completion is predicted at the end of the prompt, and the last token is nowhere.
    assert micro.predecessors[first].tolist() == [prompt - 1] * 3 + [alone[0] + int(batch.prompt_lengths[4]) - 1]
    assert_the_same_but_for_places(micro, micro_batch.padded(batch, rollouts, np.ones(count), np.ones(count)))


def test_a_completion_of_one_token_needs_no_segment():
    batch = make_batch([0])
    batch.lengths[:2] = 1
    micro = micro_batch.packed(batch, [0, 1], np.ones(4), np.ones(4), share_prompts=True)
    prompt = int(batch.prompt_lengths[0])
    assert micro.segments.tolist() == [[0, prompt, -1]]
    assert micro.predecessors.tolist() == [prompt - 1, prompt - 1]


@pytest.mark.parametrize("share", [False, True])
def test_a_packed_pass_without_rollouts_has_one_token_of_no_weight(share):
    micro = micro_batch.packed(make_batch(), [], np.ones(16), np.ones(16), share_prompts=share)
    assert not micro.real
    assert (micro.lengths.tolist(), micro.weights.tolist(), len(micro.targets)) == ([1], [0.0], 1)


def assert_the_same_but_for_places(a: MicroBatch, b: MicroBatch) -> None:
    for name in ("targets", "behaviour", "lags", "lengths", "advantages", "weights", "rollouts", "real"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    # What predicts a token is the token before it, at its position.
    before = [m.input_ids.flatten()[m.predecessors].tolist() for m in (a, b)]
    positions = [m.position_ids.flatten()[m.predecessors].tolist() for m in (a, b)]
    assert before[0] == before[1]
    assert positions[0] == positions[1]
