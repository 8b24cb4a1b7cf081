import math
from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.kernels.losses import token_loss, token_weights
from anabranch.kernels.tokens import Tokens
from anabranch.schemas.config import CorrectionSection
from anabranch.schemas.config.correction import Aggregation
from tests.unit.kernels.objective_cases import CASES, random_batch
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
    return random_batch(CorrectionSection(), seed, rollouts=rollouts, spread=0.35)


def gradient(of: Tokens, loss: torch.Tensor) -> torch.Tensor:
    (grad,) = torch.autograd.grad(loss, of.ell)
    return grad


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6), cuts=st.sets(st.integers(1, 7)))
def test_splitting_a_batch_gives_the_same_loss_gradient_and_kept_tokens(case, aggregation, seed, cuts):
    config = CASES[case].model_copy(update={"penalty": 0.01, "age_weight": 0.9})
    whole = random_batch(config, seed)
    weights = token_weights(whole.lengths, aggregation, max_tokens=9)
    expected, kept = token_loss(whole, weights, config)
    ends = [0, *sorted(cuts), 8]
    parts = [token_loss(part(whole, a, b), weights[a:b], config) for a, b in pairwise(ends)]
    split = sum(loss for loss, _ in parts)
    torch.testing.assert_close(split, expected)
    torch.testing.assert_close(gradient(whole, split), gradient(whole, expected))
    assert torch.equal(torch.cat([kept for _, kept in parts]), kept)


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


def test_penalties_by_hand():
    # d = ln 2, so r = 2: d² = 0.4805, r − 1 − d = 0.3069; A = 1, c = 0.1, dppo_tv keeps the token at τ = 1 with weight r.
    ell = torch.tensor([math.log(0.8)], dtype=torch.float64, requires_grad=True)
    of = tokens(ell, torch.tensor([math.log(0.4)], dtype=torch.float64), [1.0])
    one = torch.ones(1, dtype=torch.float64)
    d, value = math.log(2), 2 * math.log(0.8)
    for kind, loss, slope in (
        ("d2", -(value - 0.1 * d * d), -(2 - 0.2 * d)),
        ("k3", -(value - 0.1 * (1 - d)), -(2 - 0.1)),  # ∇(r − 1 − d) = r − 1
        ("k1", -(2 * (1 - 0.1 * d) * math.log(0.8)), -2 * (1 - 0.1 * d)),
    ):
        got, _ = token_loss(of, one, CorrectionSection(tau=1.0, penalty=0.1, penalty_kind=kind))
        assert got.item() == pytest.approx(loss)
        assert gradient(of, got).tolist() == pytest.approx([slope])


def test_in_the_loss_a_penalty_pulls_masked_tokens_too_as_part_of_the_reward_it_does_not():
    # p 0.5 → 0.9 at A = 1: out of the region of dppo_tv.
    ell = torch.tensor([math.log(0.9)], dtype=torch.float64, requires_grad=True)
    of = tokens(ell, torch.tensor([math.log(0.5)], dtype=torch.float64), [1.0])
    one = torch.ones(1, dtype=torch.float64)
    pulls = {}
    for kind in ("d2", "k3", "k1"):
        loss, kept = token_loss(of, one, CorrectionSection(penalty=0.1, penalty_kind=kind))
        assert not kept.any()
        pulls[kind] = gradient(of, loss).item()
    assert pulls == pytest.approx({"d2": 0.2 * math.log(1.8), "k3": 0.1 * 0.8, "k1": 0.0})


@pytest.mark.parametrize(
    ("objective", "advantage", "d", "settings"),
    [
        # A − c·d = 0.5 and −0.95, their mean −0.225 < 0, and mean(b − ℓ) = 1.55 > δ: out, the token that would go up alone too.
        ("opsm", -1.0, [-3.0, -0.1], {"penalty": 0.5}),
        # A − c·d = −0.3 and 0.34, their mean 0.02 > 0, s = e^0.2: clipped, the token whose own sign would let it through too.
        ("gspo", 0.1, [1.0, -0.6], {"penalty": 0.4}),
    ],
)
def test_as_part_of_the_reward_a_penalty_does_not_cut_a_trajectory_that_is_judged_as_a_whole(
    objective, advantage, d, settings
):
    ell = torch.tensor([-4.0, -4.0], dtype=torch.float64, requires_grad=True)
    of = tokens(ell, ell.detach() - torch.tensor(d, dtype=torch.float64), [advantage], lengths=[2])
    config = CorrectionSection(objective=objective, penalty_kind="k1", **settings)
    loss, kept = token_loss(of, torch.ones(1, dtype=torch.float64), config)
    assert kept.tolist() == [False, False]
    assert gradient(of, loss).tolist() == [0.0, 0.0]


def test_a_lag_weight_takes_from_the_numerator_alone():
    # Two rollouts of one token, lags 0 and 2, γ = 0.5: the old one counts a quarter, the fresh one no more than before.
    ell = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    of = tokens(ell, ell.detach().clone(), [1.0, 1.0], lengths=[1, 1], lags=[0, 2])
    loss, kept = token_loss(of, token_weights(of.lengths, "token_mean"), CorrectionSection(age_weight=0.5))
    assert gradient(of, loss).tolist() == [-0.5, -0.125]
    assert kept.all()


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
