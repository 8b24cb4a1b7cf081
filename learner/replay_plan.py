"""Which recorded steps have to run again, and from which checkpoint, to see one of them. Pure but for looking at folders.

Invariant: the steps of a plan are one unbroken line of the run: each begins with the policy that the one before led to. Held by
tests/unit/learner/test_replay_plan.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from anabranch.consumers.step_records import StepPlace
from anabranch.learner.checkpoint_folder import complete_checkpoints, read_marker
from anabranch.learner.engine_files import CLIENT_FILE
from anabranch.schemas.errors import CheckpointError, StepRecordError
from anabranch.schemas.versions import Forks


@dataclass(frozen=True, slots=True)
class Start:
    """A checkpoint of `step`, made in `epoch`. `folder` None: the model that the run began with, at step 0."""

    step: int
    epoch: int
    folder: Path | None


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps to run one after the other from `start`."""

    start: Start
    steps: tuple[StepPlace, ...]


def checkpoints_in(directory: Path) -> list[Start]:
    """The complete checkpoints of a run directory, oldest first. One whose files cannot be read is passed over."""
    found = []
    for folder in complete_checkpoints(directory / "checkpoints"):
        try:
            state = json.loads((folder / CLIENT_FILE).read_bytes())
            found.append(Start(read_marker(folder).step, int(state["epoch"]), folder))
        except (OSError, ValueError, KeyError, TypeError, CheckpointError):
            continue
    return found


def epoch_of_step(step: int, epoch: int, forks: Forks) -> int:
    """Which epoch of the line of `epoch` did `step`: the newest that had begun before it."""
    return max(e for e, began in forks.items() if e <= epoch and began < step)


def on_the_line(start: Start, epoch: int, forks: Forks) -> bool:
    """Whether that checkpoint is of the line that led to `epoch`: later epochs of the line forked at or above it."""
    if start.epoch not in forks and start.folder is not None:
        return False
    return all(began >= start.step for e, began in forks.items() if start.epoch < e <= epoch)


def plan(
    wanted: StepPlace,
    forks: Forks,
    checkpoints: Iterable[Start],
    recorded: Sequence[StepPlace],
    *,
    from_step: int | None = None,
) -> Segment:
    """What to run to see `wanted` again.

    Args:
        forks: of its line (`StepFacts.forks`).
        checkpoints: oldest first; the newest that fits is taken, or that of `from_step`.
        recorded: the steps that have a record.

    Raises:
        CheckpointError: none fits.
        StepRecordError: a step on the way has no record.
    """
    beginning = Start(0, min(forks), None)
    fitting = [c for c in (beginning, *checkpoints) if c.step < wanted.step and on_the_line(c, wanted.epoch, forks)]
    if forks[min(forks)] != 0:  # the line begins with a checkpoint that an older run left
        fitting.remove(beginning)
    if from_step is not None:
        fitting = [c for c in fitting if c.step == from_step]
    if not fitting:
        asked = "" if from_step is None else f" at step {from_step}"
        raise CheckpointError(
            f"no checkpoint{asked} leads to step {wanted.step} of epoch {wanted.epoch}: keep more of them "
            "(learner.keep_checkpoints, learner.keep_every)"
        )
    start = fitting[-1]
    places = {(place.epoch, place.step): place for place in recorded}
    steps = []
    for step in range(start.step + 1, wanted.step + 1):
        key = (epoch_of_step(step, wanted.epoch, forks), step)
        if key not in places:
            raise StepRecordError(
                f"step {step} of epoch {key[0]} has no record, and lies between the checkpoint of step {start.step} and step {wanted.step}"
            )
        steps.append(places[key])
    return Segment(start, tuple(steps))


def merged(segments: Iterable[Segment]) -> list[Segment]:
    """Those that begin alike and go the same way as one, which is the longest of them."""
    kept: list[Segment] = []
    ordered = sorted(segments, key=lambda s: (s.start.step, str(s.start.folder), s.steps))
    for one, after in pairwise([*ordered, None]):
        assert one is not None
        if after is None or after.start != one.start or after.steps[: len(one.steps)] != one.steps:
            kept.append(one)
    return kept
