"""What is recorded of a rollout, against numbers worked by hand and against the loss that was trained on."""

import math

import numpy as np
import pytest
import torch

from anabranch.kernels.diagnostics import DiagnosticSums
from anabranch.learner.micro_batch import packed, padded
from anabranch.learner.rollout_trace import trace
from anabranch.learner.step import microbatch_loss, plan_step
from anabranch.schemas.config import CorrectionSection
from anabranch.schemas.config.correction import Objective
from tests.unit.learner.conftest import make_batch

OBJECTIVES = list(Objective.__args__)
OPEN_VETO = {"veto_low": 0.0, "veto_high": 1e9}


def drawn(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (-4.0 + torch.randn(count, generator=generator)).clamp(max=-1e-3)


def micro_of(batch, correction: CorrectionSection, layout=padded, **kwargs):
    rows = list(range(len(batch.lengths)))
    weights = np.full(len(rows), 1 / batch.tokens)
    advantages = np.linspace(-1.0, 1.5, len(rows))
    return layout(batch, rows, advantages, weights, **kwargs)


def test_numbers_worked_by_hand():
    """Two tokens of one rollout, A = 2, weight 1/4, plain importance weighting: the factor of a token is its ratio."""
    batch = make_batch([0], samples=1)
    length = int(batch.lengths[0])
    micro = padded(batch, [0], np.array([2.0]), np.array([0.25]))
    ell = torch.from_numpy(micro.behaviour) + math.log(1.5)
    (one,) = trace(
        micro,
        ell,
        torch.ones(length),
        CorrectionSection(objective="tis", veto_low=0.0, veto_high=1e9, penalty=0.0, age_weight=1.0),
    )
    assert (one.row, one.advantage, one.weight) == (0, 2.0, 0.25)
    assert one.ratio_mean == pytest.approx(1.5, rel=1e-5)
    assert one.ratio_max == pytest.approx(1.5, rel=1e-5)
    assert one.kept_fraction == 1.0
    assert one.factor == pytest.approx([1.5] * length, rel=1e-5)
    assert one.loss_share == pytest.approx(-sum(0.25 * 1.5 * 2.0 * float(x) for x in ell), rel=1e-5)
    assert one.proximal is None
    assert np.array_equal(one.logprob, ell.numpy())


def test_each_token_has_its_own_values_and_what_the_trust_region_left_out_is_told():
    """icepop drops tokens whose ratio (proximal to behaviour) is far from 1: here every third one, at e^5."""
    batch = make_batch([0], samples=2)
    micro = padded(batch, [0, 1], np.array([1.0, -1.0]), np.array([0.5, 0.5]))
    out = np.arange(len(micro.targets)) % 3 == 0
    ell = torch.from_numpy(micro.behaviour + 5.0 * out.astype(np.float32))
    entropy, proximal = drawn(len(out), 1).abs(), ell - 0.01
    traces = trace(micro, ell, entropy, CorrectionSection(objective="icepop", **OPEN_VETO), proximal=proximal)
    parts = [np.split(x, [int(micro.lengths[0])]) for x in (out, ell.numpy(), entropy.numpy(), proximal.numpy())]
    for one, dropped, own, spread, before in zip(traces, *parts, strict=True):
        assert one.kept.tolist() == (~dropped).tolist()
        assert one.kept_fraction == pytest.approx(1 - dropped.mean())
        assert 0 < one.kept_fraction < 1
        assert np.array_equal(one.logprob, own)
        assert np.array_equal(one.entropy, spread)
        assert np.array_equal(one.proximal, before)
        assert np.array_equal(one.factor == 0, dropped)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("penalty", ["d2", "k1"])
def test_shares_add_up_to_the_loss_and_factors_to_its_gradient(objective, penalty):
    batch = make_batch(range(3))
    correction = CorrectionSection(objective=objective, penalty=0.1, penalty_kind=penalty, age_weight=0.9)
    micro = micro_of(batch, correction)
    ell = (
        torch.from_numpy(micro.behaviour)
        + 0.3 * torch.randn(len(micro.targets), generator=torch.Generator().manual_seed(1))
    ).requires_grad_()
    proximal = (ell.detach() - 0.05) if objective != "none" else None
    selected = torch.arange(len(micro.targets)) % 3 > 0
    loss = microbatch_loss(
        micro, ell, torch.zeros_like(ell), correction, DiagnosticSums(), proximal=proximal, selected=selected
    )
    (gradient,) = torch.autograd.grad(loss, ell)
    traces = trace(micro, ell, torch.zeros_like(ell), correction, proximal=proximal, selected=selected)
    assert [one.row for one in traces] == micro.rollouts.tolist()
    assert sum(one.loss_share for one in traces) == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-7)
    again = np.concatenate(
        [
            -one.weight * one.advantage * (one.factor if one.factor is not None else np.zeros(len(one.logprob)))
            for one in traces
        ]
    )
    known = np.concatenate([np.full(len(one.logprob), one.factor is not None) for one in traces])
    np.testing.assert_allclose(again[known], gradient.numpy()[known], rtol=1e-4, atol=1e-8)


def test_looking_leaves_the_graph_alone():
    micro = micro_of(make_batch(range(2)), CorrectionSection())
    ell = torch.from_numpy(micro.behaviour.copy()).requires_grad_()
    twice = ell * 2
    trace(micro, twice, torch.zeros_like(ell), CorrectionSection())
    assert ell.grad is None
    twice.sum().backward()
    assert torch.equal(ell.grad, torch.full_like(ell, 2.0))


def test_rows_are_those_of_the_batch_in_packed_rows_with_shared_prompts_too():
    batch = make_batch(range(3))
    correction = CorrectionSection()
    plain, shared = micro_of(batch, correction), micro_of(batch, correction, packed, share_prompts=True)
    ell = drawn(len(plain.targets))
    for a, b in zip(*(trace(m, ell, ell, correction) for m in (plain, shared)), strict=True):
        assert a.row == b.row
        assert np.array_equal(a.logprob, b.logprob)
        assert len(a.logprob) == batch.lengths[a.row]


def test_a_rank_with_nothing_to_do_has_nothing_to_tell():
    batch = make_batch([6], reward=lambda s: 1.0)
    (share,) = plan_step(batch, CorrectionSection(), budget_tokens=64, ranks=1, max_tokens=None)
    (micro,) = share.updates[0].microbatches
    assert trace(micro, torch.zeros(1), torch.zeros(1), CorrectionSection()) == []


def test_without_weight_or_advantage_there_is_no_factor():
    batch = make_batch([0], samples=2)
    micro = padded(batch, [0, 1], np.array([0.0, 1.0]), np.array([0.5, 0.5]))
    ell = drawn(len(micro.targets))
    without, with_one = trace(micro, ell, ell, CorrectionSection(veto_low=0.0, veto_high=1e9))
    assert without.factor is None
    assert with_one.factor is not None
