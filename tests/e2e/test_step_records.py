"""Steps of real engines, recorded: the same bits as unrecorded ones, and a record that tells what they were."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from anabranch.consumers.step_records import StepPlace, read_facts, read_rollouts, recorded_steps
from anabranch.learner.engine import LearnerEngine
from anabranch.learner.launch import launch_ranks
from anabranch.learner.step_recorder import StepRecorder
from anabranch.schemas.config import CorrectionSection, GateSection, LearnerSection, load_config
from anabranch.schemas.config.correction import Objective
from anabranch.schemas.errors import GateError
from tests.e2e.test_learner_engine import command, results
from tests.record_orders import order_of
from tests.unit.learner.conftest import OPEN, make_batch, save_qwen3

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]
WIDE = {"veto_low": 0.0, "veto_high": 1e9}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("model") / "tied")


def engine(
    model_dir: Path,
    correction: CorrectionSection,
    recorder: StepRecorder | None = None,
    gates: GateSection = OPEN,
    **learner: object,
):
    section = LearnerSection(**({"lr": 1e-3, "micro_batch_tokens": 64} | learner))
    return LearnerEngine(
        model_dir, section, correction, gates, run_seed=0, temperature=1.0, max_tokens=16, recorder=recorder
    )


def bits(made: LearnerEngine) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in made.state_bits().items()}


@pytest.mark.parametrize("objective", Objective.__args__)
def test_a_step_that_is_recorded_is_the_same_to_the_bit(model_dir: Path, tmp_path: Path, objective: str):
    correction = CorrectionSection(objective=objective, penalty=0.05, **WIDE)
    recorder = StepRecorder(load_config("", overrides=["run.name=r", f"run.dir={tmp_path}"]))
    plain, looked_at = engine(model_dir, correction), engine(model_dir, correction, recorder)
    for version, batch in enumerate([make_batch(range(3)), make_batch([5, 6])]):
        expected = plain.train_step(batch)
        order = order_of(batch, version=version)
        got = looked_at.train_share(looked_at.plan(batch)[0], order)
        assert (got.loss.hex(), got.grad_norm.hex()) == (expected.loss.hex(), expected.grad_norm.hex())
    assert bits(looked_at) == bits(plain)
    recorder.close()
    for place, made in zip(recorded_steps(tmp_path / "r"), (None, got), strict=True):
        facts = read_facts(place)
        rows = read_rollouts(place, facts)
        assert sum(rows["loss_share"].to_pylist()) == pytest.approx(facts.loss, rel=1e-4, abs=1e-6)
        if made is not None:
            assert (facts.loss_bits, facts.grad_norm_bits, facts.lr) == (got.loss.hex(), got.grad_norm.hex(), got.lr)


def test_a_step_that_a_gate_stopped_is_recorded(model_dir: Path, tmp_path: Path):
    recorder = StepRecorder(load_config("", overrides=["run.name=r", f"run.dir={tmp_path}"]))
    made = engine(
        model_dir, CorrectionSection(**WIDE), recorder, updates_per_step=2, gates=GateSection(non_finite_action="stop")
    )
    batch = make_batch()
    batch.behaviour[-1, 0] = np.nan  # of the last group: in the second update
    with pytest.raises(GateError):
        made.train_share(made.plan(batch)[0], order_of(batch))
    recorder.close()
    (place,) = recorded_steps(tmp_path / "r")
    facts = read_facts(place)
    assert [update.applied for update in facts.updates] == [True, False]
    assert any("loss = nan" in alarm for alarm in facts.alarms)
    rows = read_rollouts(place, facts).to_pylist()
    assert {row["applied"] for row in rows if row["update"] == 1} == {False}
    assert np.isnan(rows[-1]["ratio_mean"])


def test_two_ranks_record_each_its_part_and_train_as_if_they_did_not(model_dir: Path, tmp_path: Path):
    batches = []
    for k, batch in enumerate([make_batch(range(3)), make_batch([6], reward=lambda s: 1.0), make_batch([7, 8])]):
        file = tmp_path / f"{k}.npz"
        file.write_bytes(batch.to_bytes())
        batches.append(str(file))
    learner = {"zero_stage": 2, "lr": 1e-3, "micro_batch_tokens": 48}
    runs = [
        {"out": str(tmp_path / "plain"), "learner": learner, "batches": batches},
        {"out": str(tmp_path / "looked at"), "learner": learner, "batches": batches, "record": True, "run": "records"},
    ]
    assert launch_ranks(2, command(tmp_path / "job.json", model=str(model_dir), runs=runs), grace_s=5) == 0
    (plain, weights), (report, recorded) = results(tmp_path / "plain"), results(tmp_path / "looked at")
    assert report == plain
    assert {n: b.tobytes() for n, b in recorded.items()} == {n: b.tobytes() for n, b in weights.items()}
    places: list[StepPlace] = recorded_steps(tmp_path / "records")
    assert [place.step for place in places] == [1, 2, 3]
    for place, loss in zip(places, report["loss"], strict=True):
        facts = read_facts(place)
        assert facts.world_size == 2
        assert facts.loss_bits == float(loss).hex()
        assert read_rollouts(place, facts).num_rows == facts.rollouts
    assert json.loads((places[0].folder / "facts.json").read_text())["zero_stage"] == 2
    first, second = (places[0].folder / f"rank-{rank}.parquet" for rank in (0, 1))
    assert min(first.stat().st_size, second.stat().st_size) > 0
