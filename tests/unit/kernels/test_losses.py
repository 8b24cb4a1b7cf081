import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch.kernels.losses import token_loss, token_weights
from anabranch.schemas.config import CorrectionSection

LENGTHS = torch.tensor([1, 3, 4])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 8, 1 / 8, 1 / 8]),
        ("seq_mean_token_mean", [1 / 3, 1 / 9, 1 / 12]),
        ("seq_mean_token_sum", [1 / 3, 1 / 3, 1 / 3]),
        ("constant", [1 / 30, 1 / 30, 1 / 30]),
    ],
)
def test_weights_by_hand(aggregation, expected):
    assert token_weights(LENGTHS, aggregation, max_tokens=10).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@given(lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=30))
def test_means_are_means(aggregation, lengths):
    lengths = torch.tensor(lengths)
    assert float((token_weights(lengths, aggregation) * lengths).sum()) == pytest.approx(1)


def test_constant_needs_its_constant():
    with pytest.raises(ValueError, match="needs max_tokens"):
        token_weights(LENGTHS, "constant")


def batch(seed: int = 0, rows: int = 6, width: int = 5):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=g)
    mask = torch.arange(width)[None, :] < lengths[:, None]
    behaviour = -4 * torch.rand(rows, width, dtype=torch.float64, generator=g)
    ell = behaviour + 0.5 * torch.randn(rows, width, dtype=torch.float64, generator=g)
    advantage = torch.randn(rows, dtype=torch.float64, generator=g)
    return ell.requires_grad_(), behaviour, advantage, lengths, mask


CONFIGS = [
    CorrectionSection(),
    CorrectionSection(objective="grpo"),
    CorrectionSection(objective="dr_grpo"),
    CorrectionSection(objective="none", penalty=0.01),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.objective)
def test_splitting_a_batch_gives_the_same_loss_and_gradient(config):
    ell, behaviour, advantage, lengths, mask = batch()
    weight = token_weights(lengths, config.aggregation, max_tokens=5)
    whole, _ = token_loss(ell, behaviour, advantage, weight, mask, config)
    (expected,) = torch.autograd.grad(whole, ell)
    parts = [
        token_loss(ell[rows], behaviour[rows], advantage[rows], weight[rows], mask[rows], config)[0]
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    (split,) = torch.autograd.grad(sum(parts), ell)
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(split, expected)


def test_loss_by_hand():
    # One trajectory of two tokens, A = 2, both probabilities 0.5, d = 0 and ln 1.2; token mean, penalty 0.1.
    ell = torch.tensor([[math.log(0.5), math.log(0.6)]], dtype=torch.float64, requires_grad=True)
    behaviour = torch.full((1, 2), math.log(0.5), dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, kept = token_loss(ell, behaviour, 2 * one, one / 2, mask, CorrectionSection(penalty=0.1))
    d = math.log(1.2)
    assert loss.item() == pytest.approx(-(2 * math.log(0.5) + 1.2 * 2 * math.log(0.6) - 0.1 * d * d) / 2)
    (grad,) = torch.autograd.grad(loss, ell)
    assert grad.flatten().tolist() == pytest.approx([-2 / 2, -(1.2 * 2 - 0.2 * d) / 2])
    assert kept.all()


def test_a_masked_token_keeps_its_place_in_the_denominator():
    # The second token is out of the trust region: the first one's gradient is still divided by two tokens.
    ell = torch.tensor([[math.log(0.5), math.log(0.9)]], dtype=torch.float64, requires_grad=True)
    behaviour = torch.full((1, 2), math.log(0.5), dtype=torch.float64)
    weight = token_weights(torch.tensor([2]), "token_mean")
    mask = torch.ones(1, 2, dtype=torch.bool)
    one = torch.ones(1, dtype=torch.float64)
    loss, kept = token_loss(ell, behaviour, one, weight, mask, CorrectionSection(penalty=0.0))
    (grad,) = torch.autograd.grad(loss, ell)
    assert kept.tolist() == [[True, False]]
    assert grad.flatten().tolist() == [-0.5, 0.0]


def test_a_vetoed_trajectory_leaves_no_trace_not_even_its_penalty():
    ell, behaviour, advantage, lengths, mask = batch()
    weight = token_weights(lengths, "token_mean")
    behaviour[2, 0] -= 10  # ratio far above 100
    loss, kept = token_loss(ell, behaviour, advantage, weight, mask, CorrectionSection())
    (grad,) = torch.autograd.grad(loss, ell)
    assert not kept[2].any()
    assert (grad[2] == 0).all()
    assert grad.abs().sum() > 0


def test_what_stands_in_padding_never_reaches_loss_or_gradient():
    ell, behaviour, advantage, lengths, mask = batch()
    weight = token_weights(lengths, "token_mean")
    clean, _ = token_loss(ell, behaviour, advantage, weight, mask, CorrectionSection())
    dirty_behaviour = behaviour.masked_fill(~mask, -1e30)
    dirty, kept = token_loss(ell, dirty_behaviour, advantage, weight, mask, CorrectionSection())
    (grad,) = torch.autograd.grad(dirty, ell)
    assert dirty.item() == clean.item()
    assert (grad[~mask] == 0).all()
    assert not kept[~mask].any()
