import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from anabranch.kernels.advantages import group_advantages
from anabranch.learner import bench_step
from anabranch.learner.bench_packing import BenchRollouts
from anabranch.learner.bench_step import Meter, OwnStep, StepModel, as_padded_halves, step_batch
from anabranch.learner.bench_step_report import Turn, as_table, summarise
from anabranch.schemas.config import LearnerSection

MODEL = StepModel(64, 1, 300)
MIX = BenchRollouts(2, 4, prompt=12, completion=8, spread=0.7, longest=24)


def test_both_layouts_hold_the_same_tokens():
    batch = step_batch(MIX, 300)
    halves = as_padded_halves(batch, pad=299)
    for row, (prompt, length) in enumerate(zip(batch.prompt_lengths, batch.lengths, strict=True)):
        whole = np.concatenate(
            [halves[f"{half}_ids"][row][halves[f"{half}_mask"][row] == 1] for half in ("prompt", "completion")]
        )
        np.testing.assert_array_equal(whole, batch.token_ids[row, : prompt + length])
    assert (halves["prompt_mask"][:, -1] == 1).all()  # padding stands on the left of prompts
    assert (halves["completion_mask"][:, 0] == 1).all()  # and on the right of completions
    assert (halves["prompt_ids"][halves["prompt_mask"] == 0] == 299).all()
    assert halves["num_items_in_batch"] == halves["completion_mask"].sum() == batch.tokens
    assert not halves["old_per_token_logps"][halves["completion_mask"] == 0].any()


def test_advantages_handed_over_are_those_of_the_step():
    batch = step_batch(MIX, 300)
    wanted = group_advantages(torch.from_numpy(batch.rewards), torch.from_numpy(batch.group), "dr_grpo")
    np.testing.assert_array_equal(bench_step.advantages(batch), wanted.numpy().astype(np.float32))


def test_passes_and_budgets():
    batch = step_batch(MIX, 300)
    width = int(batch.prompt_lengths.max() + batch.lengths.max())
    assert bench_step.rows_within(batch, 1) == 1
    assert bench_step.rows_within(batch, 2 * width) == bench_step.rows_within(batch, 3 * width) == 2
    assert bench_step.rows_within(batch, 100 * width) == 8
    whole, half = (bench_step.budget_of_passes(MODEL, batch, n) for n in (1, 2))
    assert half < whole < int((batch.prompt_lengths + batch.lengths).sum())


def test_own_steps_agree_however_rows_are_laid_out(tmp_path):
    MODEL.save(tmp_path)
    batch, seen = step_batch(MIX, 300), []
    for packing in (True, False):
        section = LearnerSection(
            dtype="float32",
            packing=packing,
            micro_batch_tokens=64,
            betas=bench_step.BETAS,
            lr=1e-6,
            zero_stage=int(packing),
        )
        side, meter = OwnStep(tmp_path, batch, section), Meter()
        meter.begin()
        said = side.step()
        turn = Turn(**meter.end(), **said)
        assert 0 < turn.backward_seconds + turn.optimizer_seconds < turn.seconds
        assert turn.peak_mb >= turn.base_mb > 0
        seen.append((said["loss"], dict(side.gradients())))
    (loss, gradients), (other_loss, others) = seen
    assert loss == pytest.approx(other_loss, abs=1e-6)
    assert list(gradients) == sorted(others)
    assert all(name.startswith("model.") for name in gradients)
    norm = np.sqrt(sum(np.square(g.astype(float)).sum() for g in gradients.values()))
    assert 0.01 < norm < 1 + 1e-6  # clipped at 1
    assert np.sqrt(sum(np.square(gradients[n] - others[n]).sum() for n in others)) < 1e-5 * norm


def turn(seconds: float, extra: float, loss: float = 0.5) -> Turn:
    return Turn(seconds, seconds / 2, 100.0, 100.0 + extra, loss, seconds / 4, seconds / 8)


def files(folder: Path, **values: float) -> dict[str, Path]:
    for name, value in values.items():
        np.full(2**20 + 3, value, np.float32).tofile(folder / name)
    return {name: folder / name for name in values}


FACTS = {name: {"passes": 2, "positions": 1000, "budget": 600} for name in ("trl", "ours")}


def test_ratios_are_those_of_rounds_and_the_first_turn_is_in_none(tmp_path):
    turns = {
        "trl": [turn(99, 9999), turn(8, 100), turn(90, 80), turn(8, 90)],
        "ours": [turn(1, 9999), turn(4, 50), turn(30, 40), turn(2, 25)],
    }
    figures = summarise(turns, FACTS, files(tmp_path, trl=1, ours=1), completion_tokens=80)
    ratio = figures["ratios"]["ours over trl"]
    assert ratio["speed_by_round"] == [2, 3, 4]
    assert ratio["speed"] == ratio["speed_cpu"] == 3
    assert ratio["extra_memory"] == 0.5
    assert ratio["peak_memory"] == 0.75
    assert figures["ways"]["ours"]["tokens_per_s"] == 20
    assert figures["ways"]["ours"]["backward_share"] == 0.25
    assert figures["apart"] == []
    assert "| ours over trl | 3.00 | 3.00 | 0.75 | 0.50 |" in as_table(figures)


@pytest.mark.parametrize(("value", "loss"), [(1.001, 0.5), (float("nan"), 0.5), (1, 0.501), (1, float("nan"))])
def test_ways_that_compute_something_else_are_named(tmp_path, value, loss):
    turns = {"trl": [turn(1, 1), turn(1, 1)], "ours": [turn(1, 1, loss), turn(1, 1)]}
    (problem,) = summarise(turns, FACTS, files(tmp_path, trl=1, ours=value), completion_tokens=1)["apart"]
    assert "ours" in problem


def test_a_gradient_of_another_size_is_no_gradient_of_the_same(tmp_path):
    gradients = files(tmp_path, trl=1, ours=1)
    np.ones(5, np.float32).tofile(gradients["ours"])
    turns = {name: [turn(1, 1), turn(1, 1)] for name in ("trl", "ours")}
    assert summarise(turns, FACTS, gradients, completion_tokens=1)["apart"]


def load_benchmark():
    spec = importlib.util.spec_from_file_location("trl_step", Path(__file__).parents[3] / "benchmarks/trl_step.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["trl_step"] = module
    spec.loader.exec_module(module)
    return module


def test_without_trl_the_benchmark_says_how_to_get_it(monkeypatch):
    benchmark = load_benchmark()
    monkeypatch.setattr(benchmark, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install trl datasets"):
        benchmark.main(["--model", "tiny"])
    with pytest.raises(SystemExit):
        benchmark.main(["--ways", "other"])
