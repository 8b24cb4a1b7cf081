import math

import pytest
import torch

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
    # Ratios 1, 2, 1/2.
    ln2 = math.log(2)
    result, loss = sums_of([0.0, ln2, -ln2], [True, False, True]).finish(total_mass=1.0)
    assert loss == 0.5
    assert result.tokens == 3
    assert result.ratio_mean == pytest.approx(3.5 / 3)
    assert result.ratio_max == pytest.approx(2)
    assert result.kl_k1 == pytest.approx(0, abs=1e-7)
    assert result.kl_k3 == pytest.approx((0 + (1 - ln2) + (ln2 - 0.5)) / 3)
    assert result.kl_k3_same_version == pytest.approx(0)
    assert result.ess_token == pytest.approx(3.5**2 / (3 * 5.25))
    assert result.masked_fraction == pytest.approx(1 / 3)
    assert result.kept_mass == pytest.approx(0.25 + 0.5)
    assert result.entropy == pytest.approx(2)


def test_equal_policies_are_told_apart_by_nothing():
    result, _ = sums_of([0.0, 0.0, 0.0], [True, True, True]).finish(total_mass=1.0)
    assert (result.ratio_mean, result.ratio_max, result.kl_k1, result.kl_k3, result.ess_token) == (1, 1, 0, 0, 1)
    assert result.masked_fraction == 0
    assert result.kept_mass == 1


def test_adding_in_parts_equals_adding_at_once():
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 5, (6,), generator=g)
    n = int(lengths.sum())
    ell, behaviour, entropy = (-3 * torch.rand(n, generator=g) for _ in range(3))
    kept, lags = torch.rand(n, generator=g) < 0.7, torch.randint(0, 3, (n,), generator=g)
    weights, ends = torch.rand(6, generator=g), [0, *torch.cumsum(lengths, 0).tolist()]
    of = tokens(ell, behaviour, lengths=lengths.tolist(), lags=lags.tolist())

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
    assert parts.ratio_max == whole.ratio_max


def test_nothing_forwarded_gives_neutral_values():
    result, loss = DiagnosticSums().finish(total_mass=1.0)
    assert (result.tokens, result.ratio_mean, result.ess_token, result.kept_mass, loss) == (0, 1.0, 1.0, 0.0, 0.0)
    assert result.entropy is None
    assert result.kl_k3_same_version is None


def test_without_fresh_tokens_there_is_no_same_version_figure():
    sums = DiagnosticSums()
    one = torch.ones(1)
    sums.add(tokens(-one, -one, lags=[3]), kept=one.bool(), weights=one, entropy=one, loss=torch.tensor(0.0))
    assert sums.finish(total_mass=1.0)[0].kl_k3_same_version is None
