"""The learner's loop over a whole run in memory: what it leaves behind when it is told to stop, or has to resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from anabranch.consumers.reader import Reader
from anabranch.kernels.diagnostics import Diagnostics
from anabranch.learner.feed import Feed
from anabranch.learner.loop import LearnerLoop
from anabranch.learner.step import StepOutput
from anabranch.schemas.config import RunConfig, load_config
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.schemas.layout import Layout
from anabranch.schemas.metrics import NoteRecord
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_world import MemoryWorld
from anabranch.transport.metrics_log import MetricsLog, read_records
from anabranch.transport.wiring import Hub
from tests.groups import entry

SAME = Diagnostics(4, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, None)


class Engine:
    """Counts steps; its one weight is the step."""

    layout = Layout.build([("w", "f32", (1,))])
    step = 0

    def train_step(self, batch: Any) -> StepOutput:
        self.step += 1
        return StepOutput(self.step, 0.0, 0.0, 0.0, SAME, (), len(batch.group_indices))

    def state_bits(self) -> dict[str, Any]:
        return {"w": np.array([self.step], np.uint32)}


class Checkpoints:
    def __init__(self) -> None:
        self.saved: list[tuple[int, dict[str, Any]]] = []

    def save(self, engine: Engine, client_state: dict[str, Any]) -> None:
        self.saved.append((engine.step, client_state))

    def export(self, engine: Engine) -> None:
        pass


class Lab:
    def __init__(self, root: Path, *settings: str) -> None:
        self.world = MemoryWorld("run", ["east"])
        self.engine, self.checkpoints, self.root = Engine(), Checkpoints(), root
        self.config: RunConfig = load_config(
            "", overrides=["learner.groups_per_step=1", "learner.steps=2", "task.heldout_size=1", *settings]
        )

    def loop(self) -> LearnerLoop:
        world, config = self.world, self.config
        hub = Hub(channel=world.channel(), permits=world.permits, runs=world.runs, evaluations=world.evaluations)
        reader = Reader(world.streams(), run="run", group=LEARNER_GROUP, consumer="learner-0", config=config.stream)
        feed = Feed(
            reader, world.streams(), world.permits, batch_groups=1, max_age=8, block_ms=4, hub_deadline_s=1
        )  # fmt: skip
        metrics = MetricsLog(self.root)
        return LearnerLoop(
            cast(Any, self.engine), feed, hub, cast(Any, self.checkpoints), metrics, config, resumed=None
        )  # fmt: skip

    def produce(self, *indices: int) -> None:
        for index in indices:
            self.world.stream("east").append(entry(index))

    def notes(self) -> list[str]:
        return [r.what for r in read_records(self.root / "metrics.jsonl") if isinstance(r, NoteRecord)]


def test_a_run_ends_finished_with_everything_accounted_for(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "learner.evaluate=false")
    lab.produce(0, 1)
    assert lab.loop().run(lambda: False) == "all steps done"
    assert (lab.notes(), lab.world.runs.finished()) == (["started", "finished"], "all steps done")
    assert lab.world.stream("east").ledger(LEARNER_GROUP).fates == {"trained": 2}
    assert lab.world.channel().head() == PolicyVersion(1, 2)


def test_a_stop_in_the_last_evaluation_leaves_the_run_unfinished(tmp_path: Path) -> None:
    """Producers would end, and the run would be complete without its last number."""
    lab = Lab(tmp_path)
    lab.produce(0, 1)
    lab.world.evaluations.request(PolicyVersion(1, 0), 1)
    lab.world.evaluations.post(PolicyVersion(1, 0), 0, {"rewards": [0.5]})
    assert lab.loop().run(lambda: lab.engine.step == 2) == "stopped"
    assert (lab.notes(), lab.world.runs.finished()) == (["started", "stopped"], None)
    assert lab.checkpoints.saved[-1][0] == 2


def test_a_checkpoint_holds_the_reward_of_the_step_it_was_made_after(tmp_path: Path) -> None:
    """Else a learner that crashes after reaching its target resumes below it, and trains on."""
    lab = Lab(tmp_path, "learner.evaluate=false", "learner.checkpoint_every=1", "learner.target_reward=0.5")
    lab.produce(0)  # its two rollouts score 0 and 1
    assert lab.loop().run(lambda: False) == "target reward 0.5 reached"
    step, state = lab.checkpoints.saved[-1]
    assert (step, state["smoothed_reward"]) == (1, pytest.approx(0.5))
