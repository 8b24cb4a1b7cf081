"""Runs recorded steps again: one rank of `anabranch replay step`, as a program: `python -m anabranch.learner.replay_rank JOB.json`.

Invariant: a step runs through the production engine, loaded as a learner that resumes loads it, with its share of the very batch that
was recorded; what it computes is recorded in a directory of its own, in the format of any run. The run itself is only read.
Held by tests/e2e/test_replay_step.py.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from anabranch.kernels.digest import tensor_digest
from anabranch.learner.batch import TrainBatch
from anabranch.learner.checkpoint_folder import read_marker, verify
from anabranch.learner.collective import CollectiveEngine, follow
from anabranch.learner.distribute import leave_ranks, rank_from_environment
from anabranch.learner.engine import LearnerEngine
from anabranch.learner.record_order import RecordOrder
from anabranch.learner.step_recorder import StepRecorder
from anabranch.schemas.config import load_config
from anabranch.schemas.errors import AnabranchError, CheckpointError
from anabranch.schemas.layout import root_digest

MOST_TENSORS = 20


class ReplayedStep(BaseModel):
    """`batch`, `order`: files of `TrainBatch.to_bytes` and `RecordOrder.to_bytes`. `checkpoint`: of the weights that this step led to, if there is
    one; `digest`: of them, "" if it is not known."""

    step: int
    batch: Path
    order: Path
    checkpoint: Path | None = None
    digest: str = ""


class ReplayedSegment(BaseModel):
    """`config`: TOML of the learner that did these steps; `checkpoint` None: they begin with the model itself."""

    config: str
    checkpoint: Path | None
    steps: list[ReplayedStep]


class ReplayJob(BaseModel):
    """`found`: rank 0 leaves there what `Found` says."""

    segments: list[ReplayedSegment]
    found: Path


class TensorApart(BaseModel):
    name: str
    elements: int
    of: int


class FoundStep(BaseModel):
    """`digest`: root digest of the weights after the step; `error`: why the step did not end, "" if it did; `apart`: tensors that differ from the
    checkpoint of that step, where the digest does and there is one."""

    step: int
    digest: str = ""
    error: str = ""
    apart: list[TensorApart] = []


class FoundSegment(BaseModel):
    """`begin`: root digest of the weights before the first step."""

    begin: str
    steps: list[FoundStep]


def run_segment(segment: ReplayedSegment, rank: int, world_size: int) -> FoundSegment | None:
    """None on ranks above 0.

    Raises:
        CheckpointError: it cannot be loaded, or is of another step.
    """
    config = load_config(segment.config)
    recorder = StepRecorder(config, rank)
    try:
        made = LearnerEngine(
            config.model.path, config.learner, config.correction, config.gates, run_seed=config.run.seed,
            temperature=config.sampling.temperature, max_tokens=config.sampling.max_tokens,
            rank=rank, world_size=world_size, recorder=recorder,
        )  # fmt: skip
        if rank:
            follow(made)
            return None
        engine = CollectiveEngine(made, world_size=world_size)
        try:
            return _steps(segment, engine)
        finally:
            engine.stop()
    finally:
        recorder.close()


def _steps(segment: ReplayedSegment, engine: CollectiveEngine) -> FoundSegment:
    if segment.checkpoint is not None:
        _say(f"reading {segment.checkpoint}")
        verify(segment.checkpoint, read_marker(segment.checkpoint))
        engine.load(segment.checkpoint)
    first = segment.steps[0].step
    if engine.step != first - 1:
        raise CheckpointError(f"{segment.checkpoint} is of step {engine.step}, not {first - 1}")
    found = FoundSegment(begin=_digest(engine), steps=[])
    for one in segment.steps:
        _say(f"step {one.step} of {segment.steps[-1].step}")
        batch = TrainBatch.from_bytes(one.batch.read_bytes())
        order = RecordOrder.from_bytes(one.order.read_bytes())
        try:
            engine.train_step(batch, order)
        except AnabranchError as error:  # a gate stops it, as it may have then
            found.steps.append(FoundStep(step=one.step, error=str(error)))
            break
        digest = _digest(engine)
        apart: list[TensorApart] = []
        if one.digest and digest != one.digest and one.checkpoint is not None:
            apart = _apart(engine, one.checkpoint)
        found.steps.append(FoundStep(step=one.step, digest=digest, apart=apart))
        if apart:
            break  # the engine holds the recorded weights now
    return found


def _digest(engine: CollectiveEngine) -> str:
    return root_digest(engine.layout, {name: tensor_digest(bits) for name, bits in engine.state_bits().items()})


def _apart(engine: CollectiveEngine, checkpoint: Path) -> list[TensorApart]:
    ours = engine.state_bits()
    engine.load(checkpoint)
    found = []
    for name, theirs in engine.state_bits().items():
        count = int(np.count_nonzero(ours[name] != theirs))
        if count:
            found.append(TensorApart(name=name, elements=count, of=theirs.size))
    return sorted(found, key=lambda one: -one.elements / one.of)[:MOST_TENSORS]


def _say(text: str) -> None:
    print(f"replay: {text}", file=sys.stderr, flush=True)


def main(job_file: str) -> Any:
    os.dup2(2, 1)  # libraries print there, and stdout is for the result
    job = ReplayJob.model_validate_json(Path(job_file).read_bytes())
    rank, world_size = rank_from_environment() or (0, 1)
    code = 0
    try:
        found = [run_segment(segment, rank, world_size) for segment in job.segments]
        if rank == 0:
            job.found.write_text(json.dumps([one.model_dump() for one in found if one is not None]))
    except AnabranchError as error:
        print(f"anabranch replay: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    leave_ranks(code)


if __name__ == "__main__":
    main(sys.argv[1])
