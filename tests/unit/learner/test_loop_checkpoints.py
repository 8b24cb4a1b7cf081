"""Checkpoints of the learner's loop in the background: what is acknowledged when, and what a crash at any point leaves."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anabranch.learner.checkpoint_folder import Marker
from anabranch.schemas.errors import TemporaryError
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.schemas.metrics import NoteRecord, StepRecord
from anabranch.transport.metrics_log import read_records
from tests.unit.learner.test_loop import Checkpoints, Lab

SETTINGS = ("learner.evaluate=false", "learner.checkpoint_every=1", "learner.steps=3")
Unfinished = tuple[int, dict[str, object]]


class Killed(BaseException):
    """The process is gone."""


class Hooked(Checkpoints):
    """`before` and `after` are called with the step around the moment in which a checkpoint becomes durable."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[int], object] = lambda _: None
        self.after: Callable[[int], object] = lambda _: None

    def finish(self, unfinished: Unfinished, progress: Callable[[], object]) -> Marker:
        self.before(unfinished[0])
        marker = super().finish(unfinished, progress)
        self.after(unfinished[0])
        return marker


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path, *SETTINGS)
    made.checkpoints = Hooked()
    yield made
    made.die()


def until(ready: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < end, what
        time.sleep(0.001)


def fates(lab: Lab) -> dict[str, int]:
    return lab.world.stream("east").ledger(LEARNER_GROUP).fates


def steps(lab: Lab) -> list[tuple[int, int]]:
    """(epoch, step) of every line."""
    return [(r.epoch, r.step) for r in read_records(lab.root / "metrics.jsonl") if isinstance(r, StepRecord)]


def test_only_what_the_durable_checkpoint_holds_is_acknowledged(lab: Lab) -> None:
    lab.produce(0, 1, 2)
    acknowledged: dict[int, dict[str, int]] = {}

    def before(step: int) -> None:
        if step == 1:  # not durable before the next step has consumed its group
            until(lambda: lab.engine.step == 2 and len(lab.feed._consumed) == 2, "the loop does not go on")  # type: ignore[union-attr]
            assert fates(lab) == {}
        if step == 2:
            until(lambda: bool(fates(lab)), "nothing of the first checkpoint is acknowledged")
            acknowledged[2] = fates(lab)

    lab.checkpoints.before = before  # type: ignore[attr-defined]
    assert lab.loop().run(lambda: False) == "all steps done"
    assert acknowledged == {2: {"trained": 1}}
    assert fates(lab) == {"trained": 3}


def test_with_background_checkpoints_off_a_step_waits_for_the_checkpoint(tmp_path: Path) -> None:
    lab = Lab(tmp_path, *SETTINGS, "learner.background_checkpoints=false")
    lab.checkpoints, at = Hooked(), []
    lab.checkpoints.after = lambda step: at.append((step, lab.engine.step))
    lab.produce(0, 1, 2)
    assert lab.loop().run(lambda: False) == "all steps done"
    assert at == [(0, 0), (1, 1), (2, 2), (3, 3)]
    lab.die()


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_a_crash_around_the_moment_it_is_durable_leaves_no_hole_and_no_double(lab: Lab, step: int, moment: str) -> None:
    """In the books (each group trained once) and in metrics.jsonl (each step of an epoch once, none missing)."""

    def die(at: int) -> None:
        if at == step:
            raise Killed

    lab.produce(0, 1, 2)
    setattr(lab.checkpoints, moment, die)
    with pytest.raises(Killed):
        lab.loop().run(lambda: False)
    setattr(lab.checkpoints, moment, lambda _: None)
    loop = lab.resume() if lab.checkpoints.saved else lab.loop()
    came_from = lab.engine.step = lab.checkpoints.saved[-1][0] if lab.checkpoints.saved else 0
    assert [s for _, s in steps(lab)][:came_from] == list(range(1, came_from + 1)), "its steps have their lines"
    assert loop.run(lambda: False) == "all steps done"
    assert fates(lab) == {"trained": 3}
    lines = steps(lab)
    assert len(set(lines)) == len(lines)
    newest = max(epoch for epoch, _ in lines)
    held = [s for epoch, s in lines if epoch < newest and s <= came_from] + [s for epoch, s in lines if epoch == newest]
    assert sorted(held) == [1, 2, 3] or came_from == 3


def test_a_full_disk_ends_the_learner_and_nothing_is_acknowledged_for_it(lab: Lab) -> None:
    def full(step: int) -> None:
        if step == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    lab.produce(0, 1, 2)
    lab.checkpoints.before = full  # type: ignore[attr-defined]
    with pytest.raises(TemporaryError, match="checkpoint of step 2 cannot be written"):
        lab.loop().run(lambda: False)
    assert fates(lab) == {"trained": 1}
    lab.checkpoints.before = lambda _: None  # type: ignore[attr-defined]
    assert lab.resume().run(lambda: False) == "all steps done"
    assert fates(lab) == {"trained": 3}


def test_each_has_a_note(lab: Lab) -> None:
    lab.produce(0, 1, 2)
    lab.loop().run(lambda: False)
    notes = [
        r for r in read_records(lab.root / "metrics.jsonl") if isinstance(r, NoteRecord) and r.what == "checkpoint"
    ]
    assert [n.detail["step"] for n in notes] == [0, 1, 2, 3]
    assert all(n.detail.keys() == {"step", "bytes", "write_s", "finish_s"} for n in notes)
