"""A made-up run: 40 steps, two regions, an evaluation on either side."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.schemas.metrics import EvaluationRecord, NoteRecord, Record, StepRecord

MakeStep = Callable[..., StepRecord]


def drift_cell(age_from: int, advantage: str) -> dict[str, object]:
    return {
        "age_from": age_from, "advantage": advantage, "tokens": 400, "ratio_mean": 1.0, "ratio_max": 1.5, "ratio_p99": 1.2,
        "log_ratio_abs_mean": 0.02, "log_ratio_abs_max": 0.4, "kl_k1": 1e-4, "kl_k2": 2e-4, "kl_k3": 10.0 ** (age_from - 6),
        "ess_token": 0.9, "ess_sequence": 0.8, "masked_fraction": 0.01, "kept_mass": 0.3, "entropy": 0.5,
    }  # fmt: skip


def make_step(step: int, **changes: object) -> StepRecord:
    values: dict[str, object] = {
        "time_ms": 1_700_000_000_000 + 500 * step, "step": step, "steps_total": 40, "epoch": 1, "version": step,
        "reward_mean": 0.4 + 0.4 * step / 40 + 0.02 * math.sin(step), "reward_std": 0.4, "loss": -0.01, "grad_norm": 0.8,
        "lr": 1e-4, "groups": 32, "rollouts": 256, "tokens": 1500, "zero_advantage_fraction": 0.1,
        "age_tokens": {0: 500, 1: 700, 2: 200, 5: 100}, "in_flight_age_mean": 0.3, "in_queue_age_mean": 0.5,
        "ratio_mean": 1.001, "ratio_max": 1.7, "kl_k1": 1e-4, "kl_k3": 2e-4, "kl_k3_same_version": 1e-6,
        "ess_token": 0.95, "masked_fraction": 0.002, "kept_mass": 0.99, "entropy": 0.5, "dropped": {},
        "wait_s": 0.1, "step_s": 0.3, "publish_s": 0.05, "checkpoint_s": 0.0, "delta_bytes": 61_000,
        "full_bytes": 1_900_000, "changed_fraction": 0.024, "queue_depth": {"east": 12, "west": 7},
        "tokens_per_s": {"east": 1203.0, "west": 987.5}, "versions_served": {"east-0": f"e1.v{max(0, step - 1)}"},
        "eta_s": 0.5 * (40 - step),
        "drift": [drift_cell(0, "positive"), drift_cell(1, "negative"), drift_cell(4, "positive")],
    }  # fmt: skip
    return StepRecord.model_validate(values | changes)


def make_evaluation(version: int, mean_reward: float) -> EvaluationRecord:
    return EvaluationRecord(
        time_ms=1_700_000_000_000 + 500 * version, epoch=1, version=version, prompts=200, mean_reward=mean_reward,
        standard_error=0.03, temperature=1.0, seconds=2.5,
    )  # fmt: skip


@pytest.fixture
def step_record() -> MakeStep:
    return make_step


@pytest.fixture
def records() -> list[Record]:
    return [
        NoteRecord(time_ms=1_699_999_999_000, what="started"),
        make_evaluation(0, 0.412),
        *(make_step(n) for n in range(1, 41)),
        make_evaluation(40, 0.835),
        NoteRecord(time_ms=1_700_000_021_000, what="finished", detail={"reason": "all steps done"}),
    ]


@pytest.fixture
def run_dir(tmp_path: Path, records: list[Record]) -> Path:
    """A run directory that holds metrics.jsonl and nothing else."""
    folder = tmp_path / "tiny-test"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(r.model_dump_json(exclude_none=True) + "\n" for r in records))
    return folder
