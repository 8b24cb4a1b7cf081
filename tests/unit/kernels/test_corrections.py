import math

import pytest
import torch

from anabranch.kernels.corrections import LOG_RATIO_LIMIT, dppo_tv, log_ratio, policy_gradient, ppo_clip, veto
from tests.unit.kernels.token_samples import tokens


def t(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def gradient(objective, ell: torch.Tensor) -> list[float]:
    (grad,) = torch.autograd.grad(objective.value.sum(), ell)
    return grad.tolist()


OBJECTIVES = {
    "dppo_tv": lambda ell, b, a: dppo_tv(ell, b, a, tau=0.2, ratio_cap=20.0),
    "ppo_clip": lambda ell, b, a: ppo_clip(ell, b, a, clip_low=0.2, clip_high=0.28),
    "none": lambda ell, b, a: policy_gradient(ell, a),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_at_lag_zero_every_objective_is_plain_policy_gradient(name):
    behaviour = t(-0.1, -3.0, -12.0)
    ell = behaviour.clone().requires_grad_()
    advantage = t(1.0, -0.5, 2.0)
    objective = OBJECTIVES[name](ell, behaviour, advantage)
    assert gradient(objective, ell) == advantage.tolist()
    assert objective.kept.all()


def test_dppo_tv_by_hand():
    # Probabilities now and then; Δ = p − b.
    p, b = [0.6, 0.9, 0.3, 0.1, 0.02], [0.5, 0.5, 0.4, 0.5, 0.001]
    ell, behaviour = t(*map(math.log, p), grad=True), t(*map(math.log, b))
    advantage = t(1.0, 1.0, -1.0, -1.0, 2.0)
    objective = dppo_tv(ell, behaviour, advantage, tau=0.2, ratio_cap=10.0)
    # Δ = 0.1 (kept), 0.4 (out, upwards), −0.1 (kept), −0.4 (out, downwards), 0.019 (kept though r = 20: rare token).
    assert objective.kept.tolist() == [True, False, True, False, True]
    # keep · min(r, 10) · A: r = 1.2, –, 0.75, –, 20 capped to 10.
    assert gradient(objective, ell) == pytest.approx([1.2, 0.0, -0.75, 0.0, 20.0])


def test_dppo_tv_keeps_what_leads_back_into_the_region():
    # Δ = +0.4 with A < 0 pushes down, Δ = −0.4 with A > 0 pushes up: both inward.
    ell, behaviour = t(math.log(0.9), math.log(0.1), grad=True), t(math.log(0.5), math.log(0.5))
    assert dppo_tv(ell, behaviour, t(-1.0, 1.0), tau=0.2, ratio_cap=20.0).kept.tolist() == [True, True]


def test_ppo_clip_by_hand():
    # r = 1.5 and 0.5 with either sign of A; clip to [0.8, 1.28].
    ell, behaviour = t(*map(math.log, [0.6, 0.6, 0.2, 0.2]), grad=True), t(*map(math.log, [0.4] * 4))
    objective = ppo_clip(ell, behaviour, t(1.0, -1.0, 1.0, -1.0), clip_low=0.2, clip_high=0.28)
    # min(1.5, 1.28), min(−1.5, −1.28), min(0.5, 0.8), min(−0.5, −0.8)
    assert objective.value.tolist() == pytest.approx([1.28, -1.5, 0.5, -0.8])
    assert objective.kept.tolist() == [False, True, True, False]
    assert gradient(objective, ell) == pytest.approx([0.0, -1.5, 0.5, 0.0])  # ∇ of rA is rA


@pytest.mark.parametrize("name", ["ppo_clip", "none"])
def test_gradients_match_finite_differences(name):
    torch.manual_seed(0)
    behaviour = -torch.rand(32, dtype=torch.float64) * 4
    ell = (behaviour + 0.3 * torch.randn(32, dtype=torch.float64)).requires_grad_()
    advantage = torch.randn(32, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: OBJECTIVES[name](x, behaviour, advantage).value, ell)


def test_the_weight_of_dppo_tv_carries_no_gradient():
    # sg(r)·A·ℓ: the derivative is r·A, not r·A·(1 + ℓ).
    ell, behaviour = t(-1.0, grad=True), t(-1.1)
    objective = dppo_tv(ell, behaviour, t(3.0), tau=0.2, ratio_cap=20.0)
    assert gradient(objective, ell) == pytest.approx([3 * math.exp(0.1)])


def test_log_ratio_stays_finite_for_absurd_inputs():
    assert log_ratio(t(0.0, -1e6), t(-1e6, 0.0)).tolist() == [LOG_RATIO_LIMIT, -LOG_RATIO_LIMIT]


def test_veto_takes_the_whole_trajectory():
    behaviour = torch.zeros(8, dtype=torch.float64) - 10
    ell = behaviour.clone()
    ell[4] += math.log(101)  # above 100
    ell[5] += math.log(0.9e-4)  # below 1e-4
    of = tokens(ell, behaviour, lengths=[3, 2, 2, 1])
    assert veto(of, low=1e-4, high=100.0).tolist() == [False, True, True, False]
