import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch.kernels.objectives import objective_of, squared_drift
from anabranch.kernels.trust import lag_weight, mean_lag, narrowing
from anabranch.schemas.config import CorrectionSection
from tests.unit.kernels.objective_cases import random_batch
from tests.unit.kernels.token_samples import tokens


def test_narrowing_by_hand():
    # κ = 0.5 from lag 2 on: 1, 1, 1/(1 + 0.5·1), 1/(1 + 0.5·6).
    lags = torch.tensor([0, 2, 3, 8], dtype=torch.float64)
    assert narrowing(lags, rate=0.5, start=2).tolist() == pytest.approx([1, 1, 2 / 3, 1 / 4])


def test_lag_weight_by_hand():
    weights = lag_weight(torch.tensor([0, 1, 3]), 0.9, torch.float32)
    assert weights.tolist() == pytest.approx([1, 0.9, 0.729])
    assert weights.dtype == torch.float32


def test_mean_lag_by_hand():
    of = tokens(torch.zeros(5), torch.zeros(5), [1.0, 1.0], lengths=[3, 2], lags=[0, 1, 5, 4, 5])
    assert mean_lag(of).tolist() == [2.0, 4.5]


@given(lags=st.lists(st.integers(0, 64), min_size=1), rate=st.floats(0, 10), start=st.integers(0, 20))
def test_no_region_is_wider_than_whole_and_none_grows_with_lag(lags, rate, start):
    scale = narrowing(torch.tensor(sorted(lags), dtype=torch.float64), rate=rate, start=start)
    assert ((scale > 0) & (scale <= 1)).all()
    assert (scale.diff() <= 0).all()


@pytest.mark.parametrize("name", ["ppo", "grpo", "dr_grpo", "decoupled", "a3po", "opsm", "dppo_tv", "dppo_kl"])
def test_each_token_has_the_region_of_its_own_lag(name):
    """At lag l the objective is that of a configuration whose ε and τ are divided by 1 + κ·(l − 1)."""
    narrow = CorrectionSection(objective=name, narrow_with_age=True, narrow_rate=0.5, narrow_from=1)
    of = random_batch(narrow, rollouts=30)
    value, kept = objective_of(of, narrow)
    for lag in range(9):
        by = 1 + 0.5 * max(0, lag - 1)
        fixed = CorrectionSection(
            objective=name, clip_low=narrow.clip_low / by, clip_high=narrow.clip_high / by, tau=narrow.tau / by
        )
        expected, expected_kept = objective_of(of, fixed)
        here = of.lags == lag
        torch.testing.assert_close(value[here], expected[here], rtol=1e-12, atol=0)
        assert torch.equal(kept[here], expected_kept[here])
    whole = objective_of(of, narrow.model_copy(update={"narrow_with_age": False}))
    assert kept.sum() < whole.kept.sum()  # on this batch it does make a difference


def test_gspo_narrows_at_the_mean_lag_of_a_trajectory():
    # s = 1.3 with A > 0, ε₊ 0.4, κ 0.5: whole at lag 0; 0.4/2 at mean lag 2 clips to 1.2, for both tokens.
    behaviour = torch.full((4,), -2.0, dtype=torch.float64)
    ell = behaviour + torch.log(torch.tensor(1.3, dtype=torch.float64))
    of = tokens(ell, behaviour, [1.0, 1.0], lengths=[2, 2], lags=[0, 0, 0, 4])
    config = CorrectionSection(objective="gspo", clip_low=0.3, clip_high=0.4, narrow_with_age=True, narrow_rate=0.5)
    value, kept = objective_of(of, config)
    assert value.tolist() == pytest.approx([1.3, 1.3, 1.2, 1.2])
    assert kept.tolist() == [True, True, False, False]


def test_m2po_measures_an_old_token_against_a_narrower_region():
    # d² = 0.04; at lag 2 with κ 0.5 the region is half as wide: as if d² were 0.08.
    behaviour = torch.full((2,), -2.0, dtype=torch.float64)
    of = tokens(behaviour + 0.2, behaviour, lags=[0, 2])
    on = CorrectionSection(objective="m2po", narrow_with_age=True, narrow_rate=0.5)
    assert squared_drift(of, on).tolist() == pytest.approx([0.04, 0.08])
    assert squared_drift(of, CorrectionSection(objective="m2po")).tolist() == pytest.approx([0.04, 0.04])
