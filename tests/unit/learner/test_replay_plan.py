"""Which steps run again, and from where: one unbroken line of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabranch.consumers.step_records import StepPlace
from anabranch.learner.replay_plan import Segment, Start, checkpoints_in, merged, on_the_line, plan
from anabranch.schemas.errors import CheckpointError, StepRecordError

FORKS = {1: 0, 3: 4, 4: 6}  # epoch 2 published nothing that a later one came out of


def place(epoch: int, step: int) -> StepPlace:
    return StepPlace(epoch, step, Path(f"{epoch}/{step}"))


def at(step: int, epoch: int) -> Start:
    return Start(step, epoch, Path(f"step-{step}"))


# Epoch 1 did 1..5, of which 5 was given up; epoch 3 did 5..8, of which 7 and 8 were given up.
RECORDED = [*(place(1, s) for s in range(1, 6)), *(place(3, s) for s in range(5, 9)), *(place(4, s) for s in (7, 8, 9))]


def names(segment: Segment) -> list[tuple[int, int]]:
    return [(p.epoch, p.step) for p in segment.steps]


def test_the_newest_checkpoint_of_the_line_is_taken():
    found = plan(place(4, 9), FORKS, [at(2, 1), at(6, 3), at(8, 3)], RECORDED)
    assert found.start == at(6, 3), "that of step 8 is of a branch that was given up"
    assert names(found) == [(4, 7), (4, 8), (4, 9)]


def test_steps_of_older_epochs_on_the_way_run_as_those_did_them():
    assert names(plan(place(4, 7), FORKS, [at(2, 1)], RECORDED)) == [(1, 3), (1, 4), (3, 5), (3, 6), (4, 7)]


def test_a_step_that_was_given_up_has_its_own_line():
    assert names(plan(place(1, 5), {1: 0}, [at(4, 1), at(4, 3)], RECORDED)) == [(1, 5)]
    assert plan(place(1, 5), {1: 0}, [at(4, 3)], RECORDED).start == Start(0, 1, None)


def test_without_a_checkpoint_it_begins_with_the_model():
    found = plan(place(1, 2), FORKS, [], RECORDED)
    assert found.start == Start(0, 1, None)
    assert names(found) == [(1, 1), (1, 2)]


def test_one_may_be_asked_for():
    checkpoints = [at(2, 1), at(6, 3)]
    assert plan(place(4, 8), FORKS, checkpoints, RECORDED, from_step=2).start == at(2, 1)
    with pytest.raises(CheckpointError, match="no checkpoint at step 5 leads to step 8 of epoch 4"):
        plan(place(4, 8), FORKS, checkpoints, RECORDED, from_step=5)


def test_a_line_that_does_not_begin_at_zero_needs_a_checkpoint():
    with pytest.raises(CheckpointError, match="keep more of them"):
        plan(place(3, 7), {3: 6}, [], [place(3, 7)])


def test_a_hole_on_the_way_is_named():
    with pytest.raises(
        StepRecordError, match="step 5 of epoch 3 has no record, and lies between the checkpoint of step 4"
    ):
        plan(place(4, 7), FORKS, [at(4, 1)], [p for p in RECORDED if p != place(3, 5)])


@pytest.mark.parametrize(
    ("start", "fits"),
    [(at(4, 1), True), (at(5, 1), False), (at(5, 3), True), (at(7, 3), False), (at(4, 2), False), (at(6, 4), True)],
)
def test_branches_that_were_given_up_are_off_the_line(start: Start, fits: bool):
    assert on_the_line(start, 4, FORKS) is fits


def test_steps_on_the_way_to_others_run_once():
    one, two, other = (plan(place(1, s), {1: 0}, [at(2, 1)], RECORDED) for s in (3, 4, 1))
    assert merged([one, other, two]) == [other, two]


def test_checkpoints_are_those_that_are_whole(tmp_path: Path):
    for step, complete in ((2, True), (4, False), (6, True)):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "client.json").write_text(json.dumps({"epoch": 1}))
        if complete:
            marker = {"run": "r", "step": step, "layout_hash": "x", "files": {}}
            (folder / "COMPLETE.json").write_text(json.dumps(marker))
    (tmp_path / "checkpoints/step-00000006/client.json").write_text("torn")
    assert [(c.step, c.epoch) for c in checkpoints_in(tmp_path)] == [(2, 1)]
