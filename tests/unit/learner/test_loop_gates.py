"""What the learner's loop makes of a step that a gate did not let through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anabranch.learner.gates import Alarm
from anabranch.learner.step import StepOutput
from anabranch.schemas.errors import GateError
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.schemas.metrics import NoteRecord, StepRecord
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.metrics_log import read_records
from tests.unit.learner.test_loop import Engine, Lab

ALARM = Alarm("ess_token", 0.2, "below gates.ess = 0.3", "skip")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path, "learner.evaluate=false", "learner.checkpoint_every=1")
    made.produce(0, 1)
    yield made
    made.die()


def first_step(lab: Lab, monkeypatch: pytest.MonkeyPatch, outcome: Any) -> None:
    """`outcome(output)` in the place of the first step's output."""
    step = Engine.train_step

    def train_step(engine: Engine, batch: Any, order: Any = None) -> StepOutput:
        output = step(engine, batch)
        return outcome(output) if output.step == 1 else output

    monkeypatch.setattr(Engine, "train_step", train_step)


def test_a_skipped_step_is_a_version_a_line_and_a_note_and_its_group_has_a_fate(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first_step(lab, monkeypatch, lambda output: replace(output, alarms=(ALARM,), skipped_groups=(0,)))
    assert lab.loop().run(lambda: False) == "all steps done"
    assert lab.world.stream("east").ledger(LEARNER_GROUP).fates == {"dropped:gate": 1, "trained": 1}
    assert lab.world.channel().head() == PolicyVersion(1, 2)
    records = list(read_records(tmp_path / "metrics.jsonl"))
    steps = [r for r in records if isinstance(r, StepRecord)]
    assert [s.gates for s in steps] == [["ess_token = 0.2, below gates.ess = 0.3"], []]
    assert [s.skipped_groups for s in steps] == [1, 0]
    assert steps[1].dropped == {"gate": 1}
    (note,) = [r for r in records if isinstance(r, NoteRecord) and r.what == "gate"]
    assert (note.detail["action"], note.detail["step"]) == ("skip", 1)


def test_a_learner_that_a_gate_stopped_meets_the_same_group_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(output: StepOutput) -> StepOutput:
        raise GateError("loss = nan, not finite")

    with monkeypatch.context() as patched:
        first_step(lab, patched, stop)
        with pytest.raises(GateError, match="loss = nan"):
            lab.loop().run(lambda: False)
    ledger = lab.world.stream("east").ledger(LEARNER_GROUP)
    assert (ledger.fates, ledger.pending) == ({}, 2), "nothing of the step is acknowledged"
    assert lab.checkpoints.saved[-1][0] == 0
    assert lab.resume().run(lambda: False) == "all steps done"
    assert lab.world.stream("east").ledger(LEARNER_GROUP).fates == {"trained": 2}
