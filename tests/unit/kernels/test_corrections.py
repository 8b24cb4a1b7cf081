import math

import pytest
import torch

from anabranch.kernels.corrections import LOG_RATIO_LIMIT, clipped, log_ratio, veto, weighted
from tests.unit.kernels.token_samples import tokens


def t(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def gradient(value: torch.Tensor, ell: torch.Tensor) -> list[float]:
    (grad,) = torch.autograd.grad(value.sum(), ell)
    return grad.tolist()


def test_log_ratio_stays_finite_for_absurd_inputs():
    assert log_ratio(t(0.0, -1e6), t(-1e6, 0.0)).tolist() == [LOG_RATIO_LIMIT, -LOG_RATIO_LIMIT]


def test_clipped_by_hand():
    # u = 1.5 and 0.5 with either sign of A; clip to [0.8, 1.28].
    ell, behaviour = t(*map(math.log, [0.6, 0.6, 0.2, 0.2]), grad=True), t(*map(math.log, [0.4] * 4))
    objective = clipped(ell - behaviour, t(1.0, -1.0, 1.0, -1.0), clip_low=0.2, clip_high=0.28)
    # min(1.5, 1.28), min(−1.5, −1.28), min(0.5, 0.8), min(−0.5, −0.8)
    assert objective.value.tolist() == pytest.approx([1.28, -1.5, 0.5, -0.8])
    assert objective.kept.tolist() == [False, True, True, False]
    assert gradient(objective.value, ell) == pytest.approx([0.0, -1.5, 0.5, 0.0])  # ∇ of uA is uA


def test_clipped_takes_a_region_per_token():
    # u = 1.25 throughout; bounds 1.28 and 1.1: the second is clipped.
    ell = t(math.log(1.25), math.log(1.25), grad=True)
    objective = clipped(ell, t(2.0, 2.0), clip_low=t(0.2, 0.2), clip_high=t(0.28, 0.1))
    assert objective.value.tolist() == pytest.approx([2.5, 2.2])
    assert objective.kept.tolist() == [True, False]


def test_a_ratio_beyond_the_clamp_has_no_gradient_and_is_not_kept():
    # A < 0 at u = e^25: PPO does not clip that side, but the clamp holds u at e^20.
    ell = t(25.0, grad=True)
    objective = clipped(ell, t(-1.0), clip_low=0.2, clip_high=0.28)
    assert objective.value.tolist() == pytest.approx([-math.exp(20)])
    assert gradient(objective.value, ell) == [0.0]
    assert objective.kept.tolist() == [False]


def test_a_weight_carries_no_gradient_and_a_masked_one_may_be_infinite():
    # sg(w)·A·ℓ: the derivative is w·A.
    ell = t(-1.0, -math.inf, grad=True)
    objective = weighted(tokens(ell, t(-1.0, -1.0), [3.0]), t(2.0, math.inf), torch.tensor([True, False]))
    assert objective.value.tolist() == [-6.0, 0.0]
    assert gradient(objective.value, ell) == [6.0, 0.0]


def test_veto_takes_the_whole_trajectory():
    behaviour = torch.zeros(8, dtype=torch.float64) - 10
    ell = behaviour.clone()
    ell[4] += math.log(101)  # above 100
    ell[5] += math.log(0.9e-4)  # below 1e-4
    of = tokens(ell, behaviour, lengths=[3, 2, 2, 1])
    assert veto(of, low=1e-4, high=100.0).tolist() == [False, True, True, False]
