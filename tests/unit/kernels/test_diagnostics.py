import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch.kernels.diagnostics import DiagnosticSums
from tests.unit.kernels.token_samples import part, tokens

LENGTHS, LAGS = [2, 1], [0, 2, 2]
WEIGHTS = torch.tensor([0.25, 0.5])


def sums_of(d: list[float], kept: list[bool]) -> DiagnosticSums:
    behaviour = torch.full((3,), -1.0)
    sums = DiagnosticSums()
    sums.add(
        tokens(behaviour + torch.tensor(d), behaviour, lengths=LENGTHS, lags=LAGS), kept=torch.tensor(kept), weights=WEIGHTS,
        entropy=torch.tensor([1.0, 2.0, 3.0]), loss=torch.tensor(0.5),
    )  # fmt: skip
    return sums


def test_by_hand():
    # Ratios 1, 2 in the first trajectory, 1/2 in the second.
    ln2 = math.log(2)
    result, loss = sums_of([0.0, ln2, -ln2], [True, False, True]).finish(total_mass=1.0)
    total = result.total
    assert loss == 0.5
    assert total.tokens == 3
    assert total.ratio_mean == pytest.approx(3.5 / 3)
    assert total.ratio_max == pytest.approx(2)
    assert total.ratio_p99 == pytest.approx(2)
    assert total.log_ratio_abs_mean == pytest.approx(2 * ln2 / 3)
    assert total.log_ratio_abs_max == pytest.approx(ln2)
    assert total.kl_k1 == pytest.approx(0, abs=1e-7)
    assert total.kl_k2 == pytest.approx(ln2**2 / 3)
    assert total.kl_k3 == pytest.approx((0 + (1 - ln2) + (ln2 - 0.5)) / 3)
    assert total.ess_token == pytest.approx(3.5**2 / (3 * 5.25))
    assert total.ess_sequence == pytest.approx(2.5**2 / (2 * 4.25))
    assert total.masked_fraction == pytest.approx(1 / 3)
    assert total.kept_mass == pytest.approx(0.25 + 0.5)
    assert total.entropy == pytest.approx(2)


def test_tokens_are_told_apart_by_lag_and_by_the_sign_of_the_advantage():
    behaviour = torch.full((5,), -1.0)
    d = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4])
    sums = DiagnosticSums()
    sums.add(
        tokens(behaviour + d, behaviour, [1.0, -1.0], lengths=[2, 3], lags=[0, 3, 3, 3, 100]), kept=torch.ones(5).bool(),
        weights=torch.ones(2), entropy=torch.zeros(5), loss=torch.tensor(0.0),
    )  # fmt: skip
    result, _ = sums.finish(total_mass=5.0)
    assert {key: drift.tokens for key, drift in result.cells.items()} == {
        (0, "positive"): 1, (2, "positive"): 1, (2, "negative"): 2, (32, "negative"): 1,
    }  # fmt: skip
    assert {lag: drift.tokens for lag, drift in result.by_lag.items()} == {0: 1, 2: 3, 32: 1}
    assert {sign: drift.tokens for sign, drift in result.by_sign.items()} == {"positive": 2, "negative": 3}
    assert result.cells[2, "negative"].kl_k1 == pytest.approx(-0.25)
    assert result.same_version.kl_k3 == pytest.approx(0, abs=1e-7)
    # A trajectory counts where its last token does.
    assert result.cells[0, "positive"].ess_sequence is None
    assert result.cells[2, "positive"].ess_sequence == pytest.approx(1)


@given(
    d=st.lists(st.floats(-25, 25), min_size=1, max_size=300),
)
def test_the_99th_percentile_is_the_true_one_or_at_most_a_bin_above(d):
    zeros = torch.zeros(len(d), dtype=torch.float64)
    sums = DiagnosticSums()
    sums.add(
        tokens(zeros + torch.tensor(d, dtype=torch.float64), zeros), kept=zeros.bool(), weights=torch.ones(1, dtype=torch.float64), entropy=zeros,
        loss=torch.tensor(0.0),
    )  # fmt: skip
    clamped = sorted(min(20.0, max(-20.0, x)) for x in d)
    true = clamped[math.ceil(0.99 * len(d)) - 1]
    got = math.log(sums.finish(total_mass=1.0)[0].total.ratio_p99)
    assert true - 1e-9 <= got <= true + 0.06 * abs(true) + 1e-5


def test_equal_policies_are_told_apart_by_nothing():
    total = sums_of([0.0, 0.0, 0.0], [True, True, True]).finish(total_mass=1.0)[0].total
    assert (total.ratio_mean, total.ratio_max, total.kl_k1, total.kl_k3) == (1, 1, 0, 0)
    assert (total.ess_token, total.ess_sequence) == (1, 1)
    assert total.masked_fraction == 0
    assert total.kept_mass == 1


def test_adding_in_parts_equals_adding_at_once():
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 5, (6,), generator=g)
    n = int(lengths.sum())
    ell, behaviour, entropy = (-3 * torch.rand(n, generator=g) for _ in range(3))
    kept, lags = torch.rand(n, generator=g) < 0.7, torch.randint(0, 40, (n,), generator=g)
    weights, ends = torch.rand(6, generator=g), [0, *torch.cumsum(lengths, 0).tolist()]
    advantages = torch.randn(6, generator=g)
    of = tokens(ell, behaviour, advantages, lengths=lengths.tolist(), lags=lags.tolist())

    def add(sums: DiagnosticSums, start: int, stop: int) -> None:
        here = slice(ends[start], ends[stop])
        sums.add(
            part(of, start, stop),
            kept=kept[here],
            weights=weights[start:stop],
            entropy=entropy[here],
            loss=ell[here].sum(),
        )

    whole, parts = DiagnosticSums(), DiagnosticSums()
    add(whole, 0, 6)
    for start, stop in ((0, 1), (1, 5), (5, 6)):
        add(parts, start, stop)
    torch.testing.assert_close(parts.sums, whole.sums, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(parts.maxima, whole.maxima, rtol=0, atol=0)


def test_nothing_forwarded_gives_nothing():
    result, loss = DiagnosticSums().finish(total_mass=1.0)
    assert (result.total, result.cells, result.by_lag, result.by_sign, loss) == (None, {}, {}, {}, 0.0)
    assert result.same_version is None


def test_a_number_gone_wrong_shows():
    sums = DiagnosticSums()
    one = torch.ones(2)
    sums.add(
        tokens(torch.tensor([-1.0, torch.nan]), -one),
        kept=one.bool(),
        weights=one[:1],
        entropy=one,
        loss=torch.tensor(0.0),
    )
    total = sums.finish(total_mass=1.0)[0].total
    assert math.isnan(total.ratio_mean)
    assert math.isnan(total.kl_k3)
