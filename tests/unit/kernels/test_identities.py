"""What theory says is the same must come out the same: at no drift, and between objectives whose parameters meet."""

from dataclasses import replace

import pytest
import torch

from anabranch.kernels.corrections import TokenObjective
from anabranch.kernels.losses import token_loss, token_weights
from anabranch.kernels.objectives import objective_of
from anabranch.kernels.tokens import Tokens
from anabranch.schemas.config import CorrectionSection
from tests.unit.kernels.objective_cases import CASES, KEYS, random_batch, with_selection

PENALTIES = ("d2", "k3", "k1")


def config(objective: str, **keys: object) -> CorrectionSection:
    return CorrectionSection.model_validate({"objective": objective, "penalty": 0.0, **keys})


def gradient(of: Tokens, objective: TokenObjective) -> torch.Tensor:
    (grad,) = torch.autograd.grad(objective.value.sum(), of.ell)
    return grad


def without_drift(section: CorrectionSection, *, lags: bool) -> Tokens:
    """ℓ = b = p; lags 0, or of all sizes (the weights did not move in between)."""
    of = random_batch(section)
    still = replace(
        of, behaviour=of.ell.detach().clone(), proximal=of.ell.detach().clone(), lags=of.lags if lags else torch.zeros_like(of.lags)
    )  # fmt: skip
    return with_selection(still, section)


# Without drift *every* objective has the gradient of the plain policy gradient, A·∇ℓ. Their values differ: the surrogates are worth
# A, those of the form sg(w)·A·ℓ are worth A·ℓ. It is drift that tells them apart, not lag as such.
@pytest.mark.parametrize("lags", [False, True], ids=["lag 0", "any lag"])
@pytest.mark.parametrize("case", CASES)
def test_without_drift_every_objective_is_plain_policy_gradient(case, lags):
    of = without_drift(CASES[case], lags=lags)
    objective = objective_of(of, CASES[case])
    torch.testing.assert_close(gradient(of, objective), of.advantages, rtol=1e-12, atol=0)
    assert objective.kept.all()


# What does not reduce to it is the lag weight at lags above 0 (it weighs old tokens less on purpose), and so for gspo, whose gradient
# is the mean over a trajectory, that mean. At lag 0 it is 1 and all penalties have gradient 0 at d = 0.
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("case", CASES)
def test_at_lag_0_without_drift_the_whole_loss_is_that_of_plain_policy_gradient(case, penalty):
    section = CorrectionSection.model_validate(
        {"penalty": 0.1, "penalty_kind": penalty, "age_weight": 0.5, **KEYS[case]}
    )
    of = without_drift(section, lags=False)
    weights = token_weights(of.lengths, section.aggregation, max_tokens=8)
    (grad,) = torch.autograd.grad(token_loss(of, weights, section)[0], of.ell)
    torch.testing.assert_close(grad, -of.advantages * of.spread(weights), rtol=1e-12, atol=0)


def assert_same(of: Tokens, one: CorrectionSection, other: CorrectionSection, *, value: bool = True) -> None:
    a, b = objective_of(of, one), objective_of(of, other)
    if value:
        torch.testing.assert_close(a.value, b.value, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient(of, a), gradient(of, b), rtol=1e-12, atol=1e-15)
    assert torch.equal(a.kept, b.kept)


def of_single_tokens() -> Tokens:
    of = random_batch(config("ppo"))
    return replace(of, lengths=torch.ones_like(of.lags))


def test_decoupled_around_the_behaviour_policy_is_ppo():
    of = random_batch(config("decoupled"))
    assert_same(replace(of, proximal=of.behaviour), config("decoupled"), config("ppo", clip_high=0.2))


def test_decoupled_at_the_first_update_is_tis():
    of = random_batch(config("decoupled"))
    first = replace(of, proximal=of.ell.detach())
    assert_same(first, config("decoupled"), config("tis", ratio_cap=5.0), value=False)


def test_a3po_up_to_lag_1_is_ppo():
    of = random_batch(config("a3po"))
    assert_same(replace(of, lags=of.lags.clamp(max=1)), config("a3po"), config("ppo", clip_high=0.2))


def test_a3po_at_a_great_lag_is_tis_of_the_policy_itself():
    of = random_batch(config("a3po"))
    old = replace(of, lags=torch.full_like(of.lags, 10**12), proximal=of.ell.detach())
    a, b = objective_of(old, config("a3po")), objective_of(old, config("tis", ratio_cap=5.0))
    torch.testing.assert_close(gradient(old, a), gradient(old, b), rtol=1e-9, atol=0)


def test_cispo_and_aipo_differ_by_their_cap_alone():
    assert_same(random_batch(config("cispo")), config("cispo", ratio_cap=3.0), config("aipo", ratio_cap=3.0))


@pytest.mark.parametrize("objective", ["dppo_tv", "dppo_kl"])
def test_dppo_without_a_bound_is_a_capped_ratio(objective):
    assert_same(random_batch(config("aipo")), config(objective, tau=1e3), config("aipo", ratio_cap=20.0))


def test_ppo_without_a_bound_is_m2po_of_every_token():
    of = random_batch(config("ppo"))
    all_of_them = replace(of, selected=torch.ones_like(of.lags, dtype=torch.bool))
    assert_same(all_of_them, config("m2po"), config("ppo", clip_low=1 - 1e-9, clip_high=1e9))


def test_seq_mis_without_a_bound_is_a_capped_ratio():
    wide = config("seq_mis", band_low=0.0, band_high=1e9)
    assert_same(random_batch(wide), wide, config("aipo", ratio_cap=20.0))


def test_opsm_without_a_bound_is_ppo():
    assert_same(random_batch(config("opsm")), config("opsm", opsm_delta=1e3), config("ppo"))


def test_icepop_without_a_bound_is_tis():
    assert_same(
        random_batch(config("tis")), config("icepop", band_low=0.0, band_high=1e9), config("tis", ratio_cap=1e9)
    )


def test_topr_imitates_what_is_good_and_caps_the_ratio_at_one_of_what_is_bad():
    of = random_batch(config("topr"))
    good, bad = replace(of, advantages=of.advantages.abs()), replace(of, advantages=-of.advantages.abs())
    assert_same(good, config("topr"), config("none"))
    assert_same(bad, config("topr"), config("aipo", ratio_cap=1.0))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (config("gspo", clip_low=0.2, clip_high=0.28), config("ppo")),
        (config("tis", ratio_level="sequence", ratio_cap=2.0), config("tis")),
        (config("topr", ratio_level="sequence"), config("topr")),
        (config("seq_mis", sequence_ratio="product"), config("seq_mis")),
    ],
    ids=lambda c: c.objective,
)
def test_of_single_tokens_trajectory_and_token_are_one(one, other):
    assert_same(of_single_tokens(), one, other)


def test_k1_has_the_gradient_of_half_d2_where_nothing_is_corrected():
    of = random_batch(config("none"))
    weights = token_weights(of.lengths, "token_mean")
    k1 = token_loss(of, weights, config("none", penalty=0.2, penalty_kind="k1"))[0]
    d2 = token_loss(of, weights, config("none", penalty=0.1, penalty_kind="d2"))[0]
    (a,), (b,) = torch.autograd.grad(k1, of.ell), torch.autograd.grad(d2, of.ell)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
