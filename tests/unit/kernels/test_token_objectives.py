"""Numbers worked by hand. Probabilities are chosen so that ratios are short decimals; for sg(w)·A·ℓ the gradient is w·A."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch.kernels import token_objectives as objectives
from anabranch.kernels.corrections import TokenObjective
from anabranch.kernels.tokens import Tokens
from tests.unit.kernels.token_samples import tokens


def of(policy, behaviour, advantages, *, proximal=None, lags=None, selected=None) -> Tokens:
    """One rollout per token; probabilities, not log-probs."""

    def logs(values) -> torch.Tensor:
        return torch.tensor([math.log(v) for v in values], dtype=torch.float64)

    return tokens(
        logs(policy).requires_grad_(), logs(behaviour), advantages, lengths=[1] * len(policy), lags=lags,
        proximal=None if proximal is None else logs(proximal),
        selected=None if selected is None else torch.tensor(selected),
    )  # fmt: skip


def gradient(objective: TokenObjective, given: Tokens) -> list[float]:
    (grad,) = torch.autograd.grad(objective.value.sum(), given.ell)
    return grad.tolist()


def test_policy_gradient():
    given = of([0.5, 0.25], [0.1, 0.9], [2.0, -1.0])
    objective = objectives.policy_gradient(given)
    assert objective.value.tolist() == pytest.approx([2 * math.log(0.5), -math.log(0.25)])
    assert gradient(objective, given) == [2.0, -1.0]


def test_ppo():
    # r = 1.5, 1.25, 0.5 at A = 2, and r = 0.5, 1.5 at A = −2; clip to [0.8, 1.28].
    given = of([0.6, 0.5, 0.2, 0.2, 0.6], [0.4] * 5, [2.0, 2.0, 2.0, -2.0, -2.0])
    objective = objectives.ppo(given, clip_low=0.2, clip_high=0.28)
    # 1.28·2; 1.25·2; 0.5·2 (pessimistic: no clip downwards); 0.8·(−2); 1.5·(−2)
    assert objective.value.tolist() == pytest.approx([2.56, 2.5, 1.0, -1.6, -3.0])
    assert gradient(objective, given) == pytest.approx([0.0, 2.5, 1.0, 0.0, -3.0])
    assert objective.kept.tolist() == [False, True, True, False, True]


def test_decoupled():
    # w = p/b = 1.5, 8 (capped to 5), 0.5; u = π/p = 1.1, 1.25 (clipped to 1.2), 0.5 (A < 0: clipped to 0.8).
    given = of([0.33, 0.5, 0.1], [0.2, 0.05, 0.4], [2.0, 1.0, -2.0], proximal=[0.3, 0.4, 0.2])
    objective = objectives.decoupled(given, clip_low=0.2, clip_high=0.2, ratio_cap=5.0)
    # 1.5·1.1·2; 5·1.2·1; 0.5·0.8·(−2)
    assert objective.value.tolist() == pytest.approx([3.3, 6.0, -0.8])
    assert gradient(objective, given) == pytest.approx([3.3, 0.0, 0.0])
    assert objective.kept.tolist() == [True, False, False]


def test_log_linear_proximal():
    # ℓ − b = ln 16 throughout; lags 0, 1, 2, 4: α = 0, 0, 1/2, 3/4, so p/b = 1, 1, 4, 8.
    given = of([0.8] * 4, [0.05] * 4, [1.0] * 4, lags=[0, 1, 2, 4])
    proximal = objectives.log_linear_proximal(given)
    assert proximal.exp().tolist() == pytest.approx([0.05, 0.05, 0.2, 0.4])
    assert not proximal.requires_grad


def test_icepop():
    # ρ = p/b = 0.4 (below 0.5: out), 0.5 (in), 3, 5.5 (out); gradient ρ·A.
    given = of([0.3] * 4, [0.5, 0.5, 0.1, 0.1], [1.0, -2.0, 1.0, 1.0], proximal=[0.2, 0.25, 0.3, 0.55])
    objective = objectives.icepop(given, band_low=0.5 - 1e-12, band_high=5.0)
    assert objective.kept.tolist() == [False, True, True, False]
    assert objective.value.tolist() == pytest.approx([0.0, -1.0 * math.log(0.3), 3 * math.log(0.3), 0.0])
    assert gradient(objective, given) == pytest.approx([0.0, -1.0, 3.0, 0.0])


def test_capped():
    # r = 1.5, 8 (capped to 6), 0.25.
    given = of([0.3, 0.8, 0.1], [0.2, 0.1, 0.4], [2.0, -1.0, 4.0])
    objective = objectives.capped(given, ratio_cap=6.0)
    assert gradient(objective, given) == pytest.approx([3.0, -6.0, 1.0])
    assert objective.value.tolist() == pytest.approx([3 * math.log(0.3), -6 * math.log(0.8), math.log(0.1)])
    assert objective.kept.all()


def test_dppo_tv():
    # Δ = 0.1 (kept), 0.4 (out, upwards), −0.1 (kept), −0.4 (out, downwards), 0.019 (kept though r = 20: rare token).
    given = of([0.6, 0.9, 0.3, 0.1, 0.02], [0.5, 0.5, 0.4, 0.5, 0.001], [1.0, 1.0, -1.0, -1.0, 2.0])
    objective = objectives.dppo_tv(given, tau=0.2, ratio_cap=10.0)
    assert objective.kept.tolist() == [True, False, True, False, True]
    # keep · min(r, 10) · A: r = 1.2, –, 0.75, –, 20 capped to 10.
    assert gradient(objective, given) == pytest.approx([1.2, 0.0, -0.75, 0.0, 20.0])


def test_dppo_kl():
    # KL(q ‖ π) over "this token or another":
    # q 0.5 → π 0.6: ½ln(.5/.6) + ½ln(.5/.4) = ½(−0.18232 + 0.22314) = 0.02041: kept.
    # q 0.5 → π 0.7: ½(ln(.5/.7) + ln(.5/.3)) = ½(−0.33647 + 0.51083) = 0.08718: out at A > 0, kept at A < 0 (inward).
    # q 0.5 → π 0.3: the same 0.08718: out at A < 0, kept at A > 0.
    given = of([0.6, 0.7, 0.7, 0.3, 0.3], [0.5] * 5, [1.0, 1.0, -1.0, -1.0, 1.0])
    objective = objectives.dppo_kl(given, tau=0.05, ratio_cap=20.0)
    assert objective.kept.tolist() == [True, False, True, False, True]
    assert gradient(objective, given) == pytest.approx([1.2, 0.0, -1.4, 0.0, 0.6])
    for tau, kept in ((0.0203, False), (0.0205, True), (0.0871, True)):
        assert objectives.dppo_kl(given, tau=tau, ratio_cap=20.0).kept[0] == kept
    for tau, kept in ((0.0871, False), (0.0873, True)):
        assert objectives.dppo_kl(given, tau=tau, ratio_cap=20.0).kept[1] == kept


def test_dppo_kl_of_certain_tokens_is_finite():
    # log-prob exactly 0 on either side: 1 − q or 1 − π is 0. Certain to certain is no drift; certain to 0.5 is: KL = ln 2.
    ell = torch.tensor([0.0, math.log(0.5), 0.0], dtype=torch.float32, requires_grad=True)
    behaviour = torch.tensor([0.0, 0.0, math.log(0.5)])
    given = tokens(ell, behaviour, [1.0, -1.0, 1.0], lengths=[1, 1, 1])
    assert objectives.dppo_kl(given, tau=0.5, ratio_cap=20.0).kept.tolist() == [True, False, False]
    assert objectives.dppo_kl(given, tau=0.7, ratio_cap=20.0).kept.tolist() == [True, True, False]
    assert all(math.isfinite(x) for x in gradient(objectives.dppo_kl(given, tau=0.5, ratio_cap=20.0), given))


def test_m2po():
    given = of([0.6, 0.9, 0.2], [0.4, 0.1, 0.4], [2.0, 2.0, -2.0], selected=[True, False, True])
    objective = objectives.m2po(given)
    assert objective.value.tolist() == pytest.approx([3.0, 0.0, -1.0])  # r = 1.5, –, 0.5
    assert gradient(objective, given) == pytest.approx([3.0, 0.0, -1.0])
    assert objective.kept.tolist() == [True, False, True]


def test_topr():
    # A > 0: weight 1 whatever r; A < 0: min(r, 1).
    given = of([0.9, 0.1, 0.9, 0.1], [0.3, 0.4, 0.3, 0.4], [2.0, 2.0, -2.0, -2.0])
    ratio = torch.tensor([3.0, 0.25, 3.0, 0.25], dtype=torch.float64)
    objective = objectives.topr(given, ratio)
    assert gradient(objective, given) == pytest.approx([2.0, 2.0, -2.0, -0.5])
    assert objective.kept.all()


@pytest.mark.parametrize(
    ("d_squared", "tau", "expected"),
    [
        # Ascending 0, .01, .03, .16: means 0, .005, .0133, .05. Below .04 are the first three.
        ([0.03, 0.16, 0.0, 0.01], 0.04, [True, False, True, True]),
        ([0.03, 0.16, 0.0, 0.01], 0.06, [True, True, True, True]),
        # The first that does not fit is .03 (mean .0133 ≥ .01); what is larger goes with it.
        ([0.03, 0.16, 0.0, 0.01], 0.01, [False, False, True, True]),
        # Means 0, .02, .0266…: only one of the two .04 would fit under .025, so neither is kept.
        ([0.04, 0.0, 0.04], 0.025, [False, True, False]),
        ([0.5, 0.5], 0.04, [False, False]),
        ([0.04], 0.04, [False]),  # below, not at
        ([], 0.04, []),
        ([0.01, math.nan, 0.5], 0.04, [True, True, False]),  # NaN stays in, so that the loss shows it
    ],
)
def test_m2po_selection(d_squared, tau, expected):
    values = torch.tensor(d_squared, dtype=torch.float64)
    assert objectives.m2po_selection(values, tau).tolist() == expected
    assert objectives.m2po_selection(values.float(), tau).dtype == torch.bool


@given(
    values=st.lists(st.sampled_from([0.0, 0.01, 0.02, 0.05, 0.3, 2.0]), min_size=1, max_size=40),
    tau=st.sampled_from([0.005, 0.015, 0.04, 0.2, 5.0]),
    seed=st.integers(0, 99),
)
def test_m2po_selection_is_of_the_values_and_the_largest_that_fits(values, tau, seed):
    d_squared = torch.tensor(values, dtype=torch.float64)
    selected = objectives.m2po_selection(d_squared, tau)
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(objectives.m2po_selection(d_squared[order], tau), selected[order])
    if selected.any():
        assert d_squared[selected].mean() < tau
        assert d_squared[selected].max() < min([*d_squared[~selected].tolist(), math.inf])
    if not selected.all():  # the next value with all its ties would not fit
        following = d_squared <= d_squared[~selected].min()
        assert d_squared[following].mean() >= tau - 1e-12
