import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch.kernels.losses import token_loss, token_weights
from anabranch.kernels.tokens import Tokens
from anabranch.schemas.config import CorrectionSection
from tests.unit.kernels.token_samples import part, tokens

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


def batch(seed: int = 0, rollouts: int = 6) -> Tokens:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (rollouts,), generator=g)
    n = int(lengths.sum())
    behaviour = -4 * torch.rand(n, dtype=torch.float64, generator=g)
    ell = behaviour + 0.5 * torch.randn(n, dtype=torch.float64, generator=g)
    advantages = torch.randn(rollouts, dtype=torch.float64, generator=g)
    return tokens(ell.requires_grad_(), behaviour, advantages, lengths=lengths.tolist())


CONFIGS = [
    CorrectionSection(),
    CorrectionSection(objective="grpo"),
    CorrectionSection(objective="dr_grpo"),
    CorrectionSection(objective="none", penalty=0.01),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.objective)
def test_splitting_a_batch_gives_the_same_loss_and_gradient(config):
    all_of_it = batch()
    weights = token_weights(all_of_it.lengths, config.aggregation, max_tokens=5)
    whole, _ = token_loss(all_of_it, weights, config)
    (expected,) = torch.autograd.grad(whole, all_of_it.ell)
    parts = [token_loss(part(all_of_it, a, b), weights[a:b], config)[0] for a, b in ((0, 1), (1, 4), (4, 6))]
    (split,) = torch.autograd.grad(sum(parts), all_of_it.ell)
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(split, expected)


def test_loss_by_hand():
    # One trajectory of two tokens, A = 2, both probabilities 0.5, d = 0 and ln 1.2; token mean, penalty 0.1.
    ell = torch.tensor([math.log(0.5), math.log(0.6)], dtype=torch.float64, requires_grad=True)
    behaviour = torch.full((2,), math.log(0.5), dtype=torch.float64)
    half = torch.full((1,), 0.5, dtype=torch.float64)
    loss, kept = token_loss(tokens(ell, behaviour, [2.0], lengths=[2]), half, CorrectionSection(penalty=0.1))
    d = math.log(1.2)
    assert loss.item() == pytest.approx(-(2 * math.log(0.5) + 1.2 * 2 * math.log(0.6) - 0.1 * d * d) / 2)
    (grad,) = torch.autograd.grad(loss, ell)
    assert grad.tolist() == pytest.approx([-2 / 2, -(1.2 * 2 - 0.2 * d) / 2])
    assert kept.all()


def test_a_masked_token_keeps_its_place_in_the_denominator():
    # The second token is out of the trust region: the first one's gradient is still divided by two tokens.
    ell = torch.tensor([math.log(0.5), math.log(0.9)], dtype=torch.float64, requires_grad=True)
    behaviour = torch.full((2,), math.log(0.5), dtype=torch.float64)
    weights = token_weights(torch.tensor([2]), "token_mean")
    loss, kept = token_loss(tokens(ell, behaviour, [1.0], lengths=[2]), weights, CorrectionSection(penalty=0.0))
    (grad,) = torch.autograd.grad(loss, ell)
    assert kept.tolist() == [True, False]
    assert grad.tolist() == [-0.5, 0.0]


def test_a_vetoed_trajectory_leaves_no_trace_not_even_its_penalty():
    of = batch()
    weights = token_weights(of.lengths, "token_mean")
    rollout = of.spread(torch.arange(len(of.lengths)))
    of.behaviour[rollout.tolist().index(2)] -= 10  # ratio far above 100
    loss, kept = token_loss(of, weights, CorrectionSection())
    (grad,) = torch.autograd.grad(loss, of.ell)
    assert not kept[rollout == 2].any()
    assert (grad[rollout == 2] == 0).all()
    assert grad.abs().sum() > 0


def test_what_stands_in_a_vetoed_trajectory_never_reaches_loss_or_gradient():
    of = batch()
    weights = token_weights(of.lengths, "token_mean")
    first = of.spread(torch.arange(len(of.lengths))) == 0
    of.behaviour[0] = -1e30
    loss, kept = token_loss(of, weights, CorrectionSection())
    (grad,) = torch.autograd.grad(loss, of.ell)
    assert math.isfinite(loss.item())
    assert (grad[first] == 0).all()
    assert not kept[first].any()
