"""A cell's rollouts are as old as it says, sampled by exactly those weights; a cell repeats bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anabranch.deploy import lag_cell
from anabranch.deploy.lag_cell import LaggedRun, run_cell
from anabranch.deploy.lag_measures import CellResult, Measuring
from anabranch.deploy.lag_sampler import Sampler
from anabranch.learner.tiny_model import build_tokenizer
from tests.lag_models import OddPrompts, make_config, make_model

QUICK = Measuring(every=1, samples=1, final_samples=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag_cell, "_prompts", lambda _: (build_tokenizer(), OddPrompts()))


def without_time(result: CellResult) -> CellResult:
    return replace(result, seconds=0.0)


def test_at_lag_0_every_ratio_is_1(model: Path) -> None:
    run = LaggedRun(make_config(model), 0)
    for _ in range(3):
        drift = run.step(run.batch()).diagnostics.total
        assert drift is not None
        assert drift.tokens > 20
        assert drift.log_ratio_abs_max < 1e-4


@pytest.mark.parametrize("lag", [1, 3])
def test_ages_are_the_lag_and_the_sampling_weights_those_of_so_many_versions_ago(model: Path, lag: int) -> None:
    config = make_config(model)
    run = LaggedRun(config, lag)
    versions = [run.engine.state_bits()]
    fresh = Sampler(config.model.path, max_tokens=config.sampling.max_tokens)
    for now in range(5):
        batch = run.batch()
        assert batch.age_histogram() == {min(now, lag): batch.tokens}
        fresh.load(versions[max(0, now - lag)])
        row = 0
        for index in range(now * 3, now * 3 + 3):
            numbers = run._numbers("train", [index], 4)
            for completion in fresh.sample([OddPrompts().training(index)[1]], numbers, temperature=1.0)[0]:
                np.testing.assert_allclose(batch.behaviour[row, : batch.lengths[row]], completion.logprobs, atol=1e-5)
                row += 1
        output = run.step(batch)
        assert output.diagnostics.total.log_ratio_abs_max > 1e-3 or now == 0, "old weights are other weights"
        versions.append(run.engine.state_bits())


def test_a_cell_repeats_bit_for_bit_and_another_seed_is_another_cell(model: Path) -> None:
    first, second = (run_cell(make_config(model), 1, QUICK) for _ in range(2))
    assert without_time(first) == without_time(second)
    assert [version for version, _ in first.heldout] == [0, 1, 2]
    assert len(first.reward) == len(first.ess) == len(first.grad_norm) == 2
    assert first.stopped == ""
    assert without_time(run_cell(make_config(model, seed=1), 1, QUICK)) != without_time(first)


def test_corrections_of_one_seed_see_the_same_first_batch(model: Path) -> None:
    one, other = (
        LaggedRun(make_config(model, f'correction.objective="{name}"'), 2).batch() for name in ("none", "gspo")
    )
    assert np.array_equal(one.token_ids, other.token_ids)
    assert np.array_equal(one.behaviour, other.behaviour)


def test_a_lag_beyond_the_hard_bound_of_the_preset_is_trained(model: Path) -> None:
    result = run_cell(make_config(model, "correction.max_age=0", steps=3), 2, QUICK)
    assert len(result.reward) == 3
    assert all(ess is not None for ess in result.ess)


def test_a_run_whose_numbers_end_is_a_result_that_says_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LaggedRun.batch

    def spoilt(self: LaggedRun) -> Any:
        batch = real(self)
        return batch if self.engine.step == 0 else replace(batch, behaviour=np.full_like(batch.behaviour, math.nan))

    monkeypatch.setattr(LaggedRun, "batch", spoilt)
    result = run_cell(make_config(model, steps=3), 1, QUICK)
    assert "step 2" in result.stopped
    assert len(result.reward) == 1
    assert result.greedy is None
