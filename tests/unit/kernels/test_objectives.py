"""All objectives against a second implementation, and what holds for each of them."""

import importlib
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from anabranch.kernels.losses import token_loss, token_weights
from anabranch.kernels.objectives import needs_proximal, needs_selection, objective_of, selection, squared_drift
from anabranch.kernels.tokens import Tokens
from anabranch.schemas.config import CorrectionSection
from anabranch.schemas.config.correction import Advantage, Aggregation
from tests.unit.kernels.objective_cases import CASES, KEYS, NAMES, random_batch
from tests.unit.kernels.objective_reference import reference_loss
from tests.unit.kernels.token_samples import tokens

ADDED = {
    "alone": {},
    "d2": {"penalty": 0.1},
    "k3": {"penalty": 0.1, "penalty_kind": "k3"},
    "k1": {"penalty": 0.1, "penalty_kind": "k1"},
    "lag weight": {"age_weight": 0.8},
}
STEP = 1e-6


def gradient(of: Tokens, value: torch.Tensor) -> torch.Tensor:
    (grad,) = torch.autograd.grad(value.sum(), of.ell)
    return grad


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_the_formula_and_its_numeric_derivative(case, added):
    config = CorrectionSection.model_validate({"penalty": 0.0, **KEYS[case], **ADDED[added]})
    of = random_batch(config, seed=3)
    weights = token_weights(of.lengths, "seq_mean_token_mean")
    loss, _ = token_loss(of, weights, config)
    frozen = of.ell.tolist()

    def at(ell: list[float]) -> float:
        return reference_loss(of, weights.tolist(), config, ell, frozen)

    assert loss.item() == pytest.approx(at(frozen), rel=1e-12)
    numeric = []
    for t in range(len(frozen)):
        up, down = list(frozen), list(frozen)
        up[t] += STEP
        down[t] -= STEP
        numeric.append((at(up) - at(down)) / (2 * STEP))
    assert gradient(of, loss).tolist() == pytest.approx(numeric, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_kept_are_the_tokens_whose_gradient_is_not_zero(case):
    of = random_batch(CASES[case], rollouts=40)
    value, kept = objective_of(of, CASES[case])
    assert torch.equal(kept, gradient(of, value) != 0)
    masks = {"none", "tis", "cispo", "aipo", "topr", "tis of a sequence", "topr of a sequence"}
    assert kept.all() if case in masks else 0 < kept.sum() < len(kept)


@pytest.mark.parametrize("case", CASES)
def test_float32_is_float64_to_rounding_and_stays_float32(case):
    of = random_batch(CASES[case])
    narrow = Tokens(
        of.ell.float(),
        of.behaviour.float(),
        of.proximal.float(),
        of.advantages.float(),
        of.lags,
        of.lengths,
        of.selected,
    )
    value, kept = objective_of(narrow, CASES[case])
    expected, expected_kept = objective_of(of, CASES[case])
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, expected.float(), rtol=1e-5, atol=1e-6)
    assert torch.equal(kept, expected_kept)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["ell", "behaviour", "proximal"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_no_number_in_a_vetoed_trajectory_reaches_neither_loss_nor_gradient(case, field, value):
    config = CASES[case].model_copy(update={"penalty": 0.1})
    of = random_batch(config, rollouts=6)
    vetoed = of.spread(torch.arange(6)) == 2
    first = int(vetoed.nonzero()[0])
    ell, behaviour, proximal = of.ell.detach().clone(), of.behaviour.clone(), of.proximal.clone()
    if int(vetoed.sum()) < 2:
        raise AssertionError("the trajectory needs a second token, which is the one that is vetoed")
    ell[first] = behaviour[first] + math.log(1000)
    broken = {"ell": ell, "behaviour": behaviour, "proximal": proximal}
    broken[field][first + 1] = value
    of = replace(of, ell=ell.requires_grad_(), behaviour=behaviour, proximal=proximal)
    loss, kept = token_loss(of, token_weights(of.lengths, "token_mean"), config)
    grad = gradient(of, loss)
    assert math.isfinite(loss.item())
    assert grad.isfinite().all()
    assert (grad[vetoed] == 0).all()
    assert not kept[vetoed].any()
    assert grad.abs().sum() > 0


# Each of these masks its second token, whose policy says "impossible": d = −20 after the clamp, far below any region, with A < 0.
@pytest.mark.parametrize(
    "case", ["dppo_tv", "dppo_kl", "icepop", "seq_mis", "seq_mis, product", "opsm", "m2po", "ppo", "gspo"]
)
def test_an_infinity_in_a_masked_token_reaches_neither_value_nor_gradient(case):
    config = CASES[case]
    ell = torch.tensor([-1.0, -math.inf, -1.0], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([-1.0, -0.1, -1.0], dtype=torch.float64)
    of = tokens(ell, behaviour, [-1.0, -1.0], lengths=[2, 1])
    if needs_selection(config):
        of = replace(of, selected=selection(squared_drift(of, config), config))
    value, kept = objective_of(of, config)
    grad = gradient(of, value)
    assert value.isfinite().all()
    assert not kept[1]
    assert grad[1] == 0
    assert grad.isfinite().all()
    assert grad[2] == -1


@pytest.mark.parametrize("case", CASES)
def test_a_policy_that_is_no_number_is_not_masked_away(case):
    config = CASES[case]
    of = random_batch(config)
    ell = of.ell.detach().clone()
    ell[4] = math.nan
    of = replace(of, ell=ell, proximal=ell.clone())
    if needs_selection(config):
        of = replace(of, selected=selection(squared_drift(of, config), config))
    loss, _ = token_loss(of, token_weights(of.lengths, "token_mean"), config)
    assert math.isnan(loss.item())


def test_what_a_step_prepares():
    assert {name for name in NAMES if needs_selection(CorrectionSection(objective=name))} == {"m2po"}
    assert {name for name in NAMES if needs_proximal(CorrectionSection(objective=name), 1)} == {"m2po"}
    several = {name for name in NAMES if needs_proximal(CorrectionSection(objective=name), 2)}
    assert several == {"m2po", "decoupled", "tis", "icepop"}


@pytest.mark.parametrize("case", [name for name in CASES if name in NAMES])
def test_an_objective_that_asks_for_no_proximal_policy_does_not_look_at_it(case):
    config = CASES[case]
    of = random_batch(config)
    elsewhere = replace(of, proximal=torch.full_like(of.proximal, -1.0))
    same = torch.equal(objective_of(of, config).value, objective_of(elsewhere, config).value)
    assert same == (config.objective not in {"decoupled", "tis", "icepop"})


def test_a_selection_is_refused_where_there_is_none_and_asked_for_where_there_is():
    with pytest.raises(ValueError, match="ppo selects nothing"):
        selection(torch.zeros(3), CASES["ppo"])
    of = replace(random_batch(CASES["m2po"]), selected=None)
    with pytest.raises(ValueError, match=r"m2po needs Tokens\.selected"):
        objective_of(of, CASES["m2po"])


def test_the_page_about_staleness_explains_every_choice_by_a_function_that_exists():
    page = (Path(__file__).resolve().parents[3] / "docs" / "staleness.md").read_text("utf-8")
    explained = set(re.findall(r"^\| (?:penalty )?`(\w+)` \|.*\|.*\|", page, re.MULTILINE))
    penalties = get_args(CorrectionSection.model_fields["penalty_kind"].annotation)
    assert {*NAMES, *get_args(Advantage), *get_args(Aggregation), *penalties} <= explained
    modules = "corrections|token_objectives|sequence_objectives|objectives|losses|advantages|trust"
    named = set(re.findall(rf"`({modules})\.(\w+)`", page)) - {("objectives", "py")}
    assert len(named) > 15
    missing = [f for m, f in named if not hasattr(importlib.import_module(f"anabranch.kernels.{m}"), f)]
    assert not missing
