"""The learner's loop over a whole run in memory: what it leaves behind when it is told to stop, or has to resume."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from anabranch.consumers.fate_log import FateLog
from anabranch.consumers.reader import Reader
from anabranch.kernels.diagnostics import Diagnostics
from anabranch.learner.checkpoint_folder import Marker
from anabranch.learner.feed import Feed
from anabranch.learner.ledger_watch import LedgerWatch
from anabranch.learner.loop import LearnerLoop
from anabranch.learner.publish_order import EpochOpening
from anabranch.learner.run_memory import RunMemory
from anabranch.learner.shares import ArrayShare
from anabranch.learner.step import StepOutput
from anabranch.learner.weight_publisher import WeightPublisher
from anabranch.schemas.config import ChannelSection, RunConfig, load_config
from anabranch.schemas.errors import BackpressureError, ConfigError
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.metrics import NoteRecord, StepRecord
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_weight_channel import MemoryWeightChannel
from anabranch.transport.memory_world import MemoryWorld
from anabranch.transport.metrics_log import MetricsLog, read_records
from tests.groups import entry
from tests.publishers import hub_of
from tests.streams import put

SAME = Diagnostics(None, {}, {}, {})


class Engine:
    """Counts steps; its one weight is the step."""

    layout = Layout.build([("w", "f32", (1,))])
    step = 0

    def __init__(self, world: MemoryWorld) -> None:
        self.world = world
        self.connect = lambda: hub_of(self.world)

    def train_step(self, batch: Any, order: Any = None) -> StepOutput:
        self.step += 1
        return StepOutput(self.step, 0.0, 0.0, 0.0, SAME, (), len(batch.group_indices))

    def open_epoch(self, opening: EpochOpening) -> WeightPublisher:
        publisher = WeightPublisher(
            self._share(),
            lambda: self.connect(),
            ChannelSection(connect_deadline_s=20.0),
            opening,
            on_committed=lambda hub, policy: hub.permits.advance(policy.version, epoch=policy.epoch),
        )
        publisher.open()
        return publisher

    def publish(self, publisher: WeightPublisher, version: int) -> float:
        publisher._share = self._share()
        return publisher.publish(publisher.next_order(version))

    def _share(self) -> ArrayShare:
        return ArrayShare(self.layout, {"w": np.array([self.step], np.uint32)})


class Checkpoints:
    def __init__(self) -> None:
        self.saved: list[tuple[int, dict[str, Any]]] = []

    def begin(self, engine: Engine, client_state: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return engine.step, json.loads(json.dumps(client_state))

    def finish(self, unfinished: tuple[int, dict[str, Any]], progress: Callable[[], object]) -> Marker:
        self.saved.append(unfinished)
        return Marker(run="run", step=unfinished[0], layout_hash="", files={})

    def export(self, engine: Engine) -> None:
        pass


class Lab:
    def __init__(self, root: Path, *settings: str) -> None:
        self.world = MemoryWorld("run", ["east"])
        self.engine, self.checkpoints, self.root = Engine(self.world), Checkpoints(), root
        self.feed: Feed | None = None
        self.config: RunConfig = load_config(
            "", overrides=["learner.groups_per_step=1", "learner.steps=2", "task.heldout_size=1", *settings]
        )

    def loop(self, *, resumed: dict[str, Any] | None = None) -> LearnerLoop:
        world, config = self.world, self.config
        self.engine.world, hub = world, hub_of(world)
        self.die()
        state = (resumed or {}).get("feed", {})
        fates = FateLog(self.root / "fates", file_lines=100, since=state.get("fate_log"))
        reader = Reader(
            world.streams(), run="run", group=LEARNER_GROUP, consumer="learner-0",
            config=config.stream.model_copy(update={"block_ms": 4}), ledger_every_s=0.01,
        )  # fmt: skip
        self.feed = Feed(
            reader, world.permits, fates, batch_groups=1, max_age=8, block_ms=4, hub_deadline_s=1, resumed=state
        )
        metrics = MetricsLog(self.root)
        memory = RunMemory(self.root)
        self.heartbeats = 0
        return LearnerLoop(
            cast(Any, self.engine), self.feed, hub, cast(Any, self.checkpoints), memory, metrics, config,
            watch=LedgerWatch(reader, fates), resumed=resumed, heartbeat=self._beat,
        )  # fmt: skip

    def _beat(self) -> None:
        self.heartbeats += 1

    def die(self) -> None:
        if self.feed is not None:
            self.feed.close()

    def produce(self, *indices: int) -> None:
        for index in indices:
            put(self.world.stream("east"), entry(index))

    def resume(self) -> LearnerLoop:
        """A learner that starts again from the newest checkpoint."""
        self.engine.step, state = self.checkpoints.saved[-1]
        return self.loop(resumed=state)

    def notes(self) -> list[str]:
        """All but those of checkpoints."""
        notes = [r.what for r in read_records(self.root / "metrics.jsonl") if isinstance(r, NoteRecord)]
        return [what for what in notes if what != "checkpoint"]


MakeLab = Callable[..., Lab]


@pytest.fixture
def make_lab(tmp_path: Path) -> Iterator[MakeLab]:
    made: list[Lab] = []

    def make(*settings: str) -> Lab:
        made.append(Lab(tmp_path, *settings))
        return made[-1]

    yield make
    for lab in made:
        lab.die()


def test_a_run_ends_finished_with_everything_accounted_for(make_lab: MakeLab) -> None:
    lab = make_lab("learner.evaluate=false")
    lab.produce(0, 1)
    assert lab.loop().run(lambda: False) == "all steps done"
    assert (lab.notes(), lab.world.runs.finished()) == (["started", "finished"], "all steps done")
    assert lab.world.stream("east").ledger(LEARNER_GROUP).fates == {"trained": 2}
    assert lab.world.channel().head() == PolicyVersion(1, 2)


def test_a_record_says_which_version_its_figures_are_of(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab("learner.evaluate=false")
    lab.produce(0, 1)
    lab.loop().run(lambda: False)
    steps = [r for r in read_records(tmp_path / "metrics.jsonl") if isinstance(r, StepRecord)]
    assert [s.version for s in steps] == [1, 2]
    for step in steps:  # publishing is in the background: this step's version may be there already, or not
        assert step.committed_version in (step.version - 1, step.version)
        assert step.full_bytes == 4
        assert (step.delta_bytes > 0) == (step.changed_fraction == 1.0) == (step.committed_version > 0)


class Refusing(MemoryWeightChannel):
    def commit(self, manifest: Manifest) -> None:
        if manifest.kind == "delta":
            raise ConfigError("another learner works on this run")
        super().commit(manifest)


def test_a_failure_of_publishing_ends_the_loop_while_it_waits_for_a_batch(make_lab: MakeLab) -> None:
    """Not when the batch is there: no producer would ever make it without the weights."""
    lab = make_lab("learner.evaluate=false")
    lab.engine.connect = lambda: hub_of(lab.world, Refusing(lab.world.weights))
    lab.produce(0)
    with pytest.raises(ConfigError, match="another learner works on this run"):
        lab.loop().run(lambda: False)
    assert lab.engine.step == 1
    assert lab.world.channel().head() == PolicyVersion(1, 0)


def test_a_learner_that_is_stopped_leaves_its_last_version_on_the_channel(make_lab: MakeLab) -> None:
    """The next epoch begins there without a byte: as its fork."""
    lab = make_lab("learner.evaluate=false")
    lab.produce(0)
    assert lab.loop().run(lambda: lab.engine.step == 1) == "stopped"
    assert lab.world.channel().head() == PolicyVersion(1, 1)
    lab.resume().run(lambda: True)
    assert [(str(e.policy), e.label) for e in lab.world.channel().index()][-1] == ("e2.v1", "fork")


def test_a_stop_in_the_last_evaluation_leaves_the_run_unfinished(make_lab: MakeLab) -> None:
    """Producers would end, and the run would be complete without its last number."""
    lab = make_lab()
    lab.produce(0, 1)
    lab.world.evaluations.request(PolicyVersion(1, 0), 1)
    lab.world.evaluations.post(PolicyVersion(1, 0), 0, {"rewards": [0.5]})
    assert lab.loop().run(lambda: lab.engine.step == 2) == "stopped"
    assert (lab.notes(), lab.world.runs.finished()) == (["started", "stopped"], None)
    assert lab.checkpoints.saved[-1][0] == 2


def test_a_checkpoint_holds_the_reward_of_the_step_it_was_made_after(make_lab: MakeLab) -> None:
    """Else a learner that crashes after reaching its target resumes below it, and trains on."""
    lab = make_lab("learner.evaluate=false", "learner.checkpoint_every=1", "learner.target_reward=0.5")
    lab.produce(0)  # its two rollouts score 0 and 1
    assert lab.loop().run(lambda: False) == "target reward 0.5 reached"
    step, state = lab.checkpoints.saved[-1]
    assert (step, state["smoothed_reward"]) == (1, pytest.approx(0.5))


def test_a_learner_that_died_after_the_last_evaluation_goes_straight_to_the_end(make_lab: MakeLab) -> None:
    """The producers may have ended: an evaluation asked for again would have nobody to do it."""
    lab = make_lab("learner.evaluate_deadline_s=0.2")
    lab.produce(0, 1)
    for policy in (PolicyVersion(1, 0), PolicyVersion(1, 2)):
        lab.world.evaluations.request(policy, 1)
        lab.world.evaluations.post(policy, 0, {"rewards": [0.5]})
    assert lab.loop().run(lambda: False) == "all steps done"
    lab.world.runs.start()  # what a crash just before leaves: nobody knows yet that the run is over
    assert lab.resume().run(lambda: False) == "all steps done"
    assert lab.world.runs.finished() == "all steps done"
    assert lab.notes() == ["started", "finished", "finished"]


def test_a_run_that_is_made_longer_goes_on(make_lab: MakeLab) -> None:
    lab = make_lab("learner.evaluate=false")
    lab.produce(0, 1)
    lab.loop().run(lambda: False)
    lab.config = load_config("", overrides=["learner.groups_per_step=1", "learner.evaluate=false", "learner.steps=3"])
    lab.produce(2)
    assert lab.resume().run(lambda: False) == "all steps done"
    assert lab.engine.step == 3


def test_an_epoch_that_was_opened_is_never_opened_again_whatever_the_hub_lost(make_lab: MakeLab) -> None:
    """Producers may still hold weights of the epoch that came after the checkpoint."""
    lab = make_lab("learner.evaluate=false")
    lab.loop().run(lambda: True)
    for expected in (2, 3):
        lab.world = MemoryWorld("run", ["east"])
        assert lab.checkpoints.saved == lab.checkpoints.saved[:1], "no checkpoint since the first epoch"
        lab.resume().run(lambda: True)
        assert lab.world.channel().head() == PolicyVersion(expected, 0)


def test_a_learner_that_waits_for_the_hub_says_that_it_lives(make_lab: MakeLab) -> None:
    """A hub that is away or full for longer than the watchdog must not get the learner killed."""
    lab = make_lab("learner.steps=1", "learner.evaluate=false")
    loop, runs = lab.loop(), lab.world.runs
    beats: list[int] = []

    def refused() -> None:
        beats.append(lab.heartbeats)
        if len(beats) < 4:
            raise BackpressureError("the hub is full")

    runs.start = refused  # type: ignore[method-assign]
    lab.produce(0)
    assert loop.run(lambda: False) == "all steps done"
    assert all(earlier < later for earlier, later in itertools.pairwise(beats))
