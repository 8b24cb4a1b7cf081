"""Numbers worked by hand: rollout 0 has two tokens, rollout 1 one, and so on as each test says."""

import math

import pytest
import torch

from anabranch.kernels import sequence_objectives as objectives
from anabranch.kernels.corrections import TokenObjective
from anabranch.kernels.tokens import Tokens
from tests.unit.kernels.token_samples import tokens

LN2 = math.log(2)


def of(d, advantages, lengths, *, lags=None, proximal=None) -> Tokens:
    """Tokens with behaviour log-prob −2 throughout; `d` and `proximal` are ℓ − b and p − b."""
    behaviour = torch.full((len(d),), -2.0, dtype=torch.float64)
    ell = (behaviour + torch.tensor(d, dtype=torch.float64)).requires_grad_()
    p = None if proximal is None else behaviour + torch.tensor(proximal, dtype=torch.float64)
    return tokens(ell, behaviour, advantages, lengths=lengths, lags=lags, proximal=p)


def gradient(objective: TokenObjective, given: Tokens) -> list[float]:
    (grad,) = torch.autograd.grad(objective.value.sum(), given.ell)
    return grad.tolist()


def test_ratios():
    # Sums: ln 2 + ln 2 = ln 4; −ln 2.
    given = of([LN2, LN2, -LN2], [1.0, 1.0], [2, 1])
    assert objectives.ratio_of(given, given.ell, "token").tolist() == pytest.approx([2, 2, 0.5])
    assert objectives.ratio_of(given, given.ell, "sequence").tolist() == pytest.approx([4, 4, 0.5])
    long = of([15.0, 15.0, 25.0], [1.0, 1.0], [2, 1])
    assert objectives.ratio_of(long, long.ell, "sequence").tolist() == pytest.approx([math.exp(20)] * 3)


def test_tis():
    # Token ratios of p: 4, 1, 1/2, capped at 2; of the trajectories 4 and 1/2, capped at 3.
    given = of([0.0, 0.0, 0.0], [2.0, -1.0], [2, 1], proximal=[2 * LN2, 0.0, -LN2])
    token = objectives.tis(given, ratio_cap=2.0, level="token")
    assert gradient(token, given) == pytest.approx([4.0, 2.0, -0.5])
    assert token.value.tolist() == pytest.approx([-8.0, -4.0, 1.0])  # times ℓ = −2
    assert gradient(objectives.tis(given, ratio_cap=3.0, level="sequence"), given) == pytest.approx([6.0, 6.0, -0.5])
    assert token.kept.all()


def test_gspo():
    # Rollout 0: mean d = (ln 2 + 0)/2, s = √2 = 1.414, A = 2. Rollout 1: s = 1/2, A = −2.
    given = of([LN2, 0.0, -LN2], [2.0, -2.0], [2, 1])
    wide = objectives.gspo(given, clip_low=0.6, clip_high=0.5)  # [0.4, 1.5] holds both
    assert wide.value.tolist() == pytest.approx([2 * 2**0.5] * 2 + [-1.0])
    # Σ over the rollout's two tokens of s·A, whose derivative in each ℓ is 2·s·A/2.
    assert gradient(wide, given) == pytest.approx([2 * 2**0.5] * 2 + [-1.0])
    narrow = objectives.gspo(given, clip_low=0.4, clip_high=0.3)  # [0.6, 1.3] holds neither
    assert narrow.value.tolist() == pytest.approx([2.6, 2.6, -1.2])
    assert gradient(narrow, given) == [0.0, 0.0, 0.0]
    assert (wide.kept.tolist(), narrow.kept.tolist()) == ([True] * 3, [False] * 3)


def mis(given: Tokens, form: str, *, widening: float = 0.0) -> TokenObjective:
    return objectives.seq_mis(
        given, band_low=0.5, band_high=3.0, widening=widening, form=form, ratio_cap=3.0
    )  # fmt: skip


def test_seq_mis():
    # Rollout 0: Σd = ln 8, ratio 8 out of [0.5, 3]; geometric over T = 3: 2, in. Rollout 1: 0.25, out both ways.
    given = of([2 * LN2, LN2, 0.0, -2 * LN2], [1.0, 1.0], [3, 1])
    assert mis(given, "product").kept.tolist() == [False] * 4
    kept = mis(given, "geometric")
    assert kept.kept.tolist() == [True, True, True, False]
    assert gradient(kept, given) == pytest.approx([3.0, 2.0, 1.0, 0.0])  # token ratios 4 (capped to 3), 2, 1


def test_seq_mis_loosens_with_mean_lag():
    # Ratio 4, band [0.5, 3] times 1 + 0.1·lag: mean lag 3 gives 3.9 (out), mean lag 4 gives 4.2 (in); and 0.25 against 0.5/(1 + lag/2).
    given = of([LN2, LN2, LN2, LN2], [1.0, 1.0], [2, 2], lags=[0, 6, 2, 6])
    assert mis(given, "product", widening=0.1).kept.tolist() == [False, False, True, True]
    below = of([-2 * LN2, -2 * LN2], [1.0, 1.0], [1, 1], lags=[1, 3])  # 0.333, 0.2
    assert mis(below, "product", widening=0.5).kept.tolist() == [False, True]


def test_opsm():
    # mean(b − ℓ) = ½(0.3 + 0.1) = 0.2 > 0.1: dropped where A < 0, kept where A > 0; 0.05 is kept.
    given = of([-0.3, -0.1, -0.3, -0.1, -0.05], [-1.0, 1.0, -1.0], [2, 2, 1])
    objective = objectives.opsm(given, delta=0.1, clip_low=0.5, clip_high=0.5)
    assert objective.kept.tolist() == [False, False, True, True, True]
    expected = [0.0, 0.0, math.exp(-0.3), math.exp(-0.1), -math.exp(-0.05)]
    assert objective.value.tolist() == pytest.approx(expected)
    assert gradient(objective, given) == pytest.approx(expected)


def test_opsm_clips_as_ppo_does():
    # r = e^0.5 = 1.65 at A > 0, clipped at 1.28; a policy that gives a bad trajectory more weight (b − ℓ < 0) is pushed back.
    given = of([0.5, 0.5], [1.0, -1.0], [1, 1])
    objective = objectives.opsm(given, delta=0.1, clip_low=0.2, clip_high=0.28)
    assert objective.value.tolist() == pytest.approx([1.28, -math.exp(0.5)])
    assert objective.kept.tolist() == [False, True]
