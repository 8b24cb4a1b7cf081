"""`anabranch learn`: wires the learner together; one process per rank.

Invariant: only rank 0 reads streams, decides, and writes the run directory; the others talk to the hub and the blob store
for their share of the weights alone. A start with a checkpoint in the run directory resumes from the newest complete one.
Held by tests/unit/learner/test_service.py and tests/e2e/test_two_ranks.py.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import structlog

from anabranch.consumers.fate_files import FATES_DIRECTORY
from anabranch.consumers.fate_log import FateLog
from anabranch.consumers.reader import Reader
from anabranch.learner.checkpoint import CheckpointStore
from anabranch.learner.collective import CollectiveEngine, follow
from anabranch.learner.distribute import leave_ranks, rank_from_environment
from anabranch.learner.engine import LearnerEngine
from anabranch.learner.feed import Feed
from anabranch.learner.launch import launch_ranks
from anabranch.learner.launchers import launchers, other_ranks, stop_by_launcher, watch_launchers
from anabranch.learner.ledger_watch import LedgerWatch
from anabranch.learner.loop import LearnerLoop
from anabranch.learner.no_progress import NoProgress
from anabranch.learner.publish_order import EpochOpening
from anabranch.learner.run_memory import RunMemory
from anabranch.learner.step_recorder import StepRecorder
from anabranch.learner.version_lines import VersionLines
from anabranch.learner.weight_publisher import WeightPublisher
from anabranch.schemas.config import RunConfig, dump_toml
from anabranch.schemas.errors import EXIT_TEMPORARY
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.schemas.version_record import VERSIONS_FILE
from anabranch.transport.files import write_atomically
from anabranch.transport.log import setup_logging
from anabranch.transport.metrics_log import MetricsLog
from anabranch.transport.runtime import StopSignal, run_service, sd_notify
from anabranch.transport.wiring import connect_hub, connect_regions

RESOLVED_FILE = "resolved.toml"
LAUNCHER_GRACE_S = 120.0


def learn(config: RunConfig) -> int:
    """Run the learner (all its ranks, or the one that a launcher started); returns the exit code."""
    placed = rank_from_environment()
    if placed is None and config.learner.world_size > 1:
        return launch_ranks(config.learner.world_size)
    rank, world_size = placed or (0, 1)
    setup_logging("learner" if rank == 0 else f"learner-{rank}")
    stop = StopSignal()
    if launchers():
        stop_by_launcher(stop)
        watch_launchers(lambda: _launcher_gone(rank, stop))
    else:
        stop.install()

    heartbeat = Heartbeat()

    def make_publisher(engine: LearnerEngine, opening: EpochOpening) -> WeightPublisher:
        return WeightPublisher(
            engine.share,
            lambda: connect_hub(config),
            config.channel,
            opening,
            on_committed=lambda hub, policy: hub.permits.advance(policy.version, epoch=policy.epoch),
            lines=VersionLines(config.run.directory / VERSIONS_FILE) if rank == 0 else None,
        )

    def main() -> int:
        recorder = StepRecorder(config, rank) if config.recorder.steps else None
        try:
            with other_ranks(rank, world_size):
                return train(recorder)
        finally:
            if recorder is not None:
                recorder.close()

    def train(recorder: StepRecorder | None) -> int:
        engine = LearnerEngine(
            config.model.path,
            config.learner,
            config.correction,
            config.gates,
            run_seed=config.run.seed,
            temperature=config.sampling.temperature,
            max_tokens=config.sampling.max_tokens,
            rank=rank,
            world_size=world_size,
            recorder=recorder,
            # Rank 0 speaks for all.
            heartbeat=heartbeat if rank == 0 else lambda: None,
        )
        if rank:
            follow(engine, make_publisher)
            return 0
        collective = CollectiveEngine(engine, world_size=world_size, make_publisher=make_publisher)
        try:
            return _lead(config, collective, stop, heartbeat, recorder)
        finally:
            collective.stop()

    code = run_service(main)
    if world_size > 1:
        leave_ranks(code)
    return code


def _launcher_gone(rank: int, stop: StopSignal) -> None:
    stop.set("the launcher is gone")
    if rank:
        # Rank 0 lets this one go as soon as it has made its checkpoint, unless it is on another node and knows nothing.
        time.sleep(LAUNCHER_GRACE_S)
        os._exit(EXIT_TEMPORARY)


def write_resolved(directory: Path, config: RunConfig) -> None:
    """What this learner runs with, passwords masked. Never `config.toml`: that may be the user's own, with the passwords
    that the next start needs."""
    write_atomically(directory / RESOLVED_FILE, dump_toml(config).encode())


class Heartbeat:
    """Tells whoever watches this process that it lives; call it as often as you like."""

    EVERY_S = 1.0

    def __init__(self) -> None:
        self._last_s = -math.inf

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._last_s >= self.EVERY_S:
            self._last_s = now
            sd_notify("WATCHDOG=1")


def _lead(
    config: RunConfig,
    engine: CollectiveEngine,
    stop: StopSignal,
    heartbeat: Heartbeat,
    recorder: StepRecorder | None = None,
) -> int:
    log = structlog.get_logger()
    directory = config.run.directory
    hub = connect_hub(config)
    streams = connect_regions(config)
    checkpoints = CheckpointStore(
        directory / "checkpoints",
        run=config.run.name,
        layout_hash=engine.layout.hash,
        keep=config.learner.keep_checkpoints,
        keep_every=config.learner.keep_every,
        heartbeat=heartbeat,
    )
    resumed = checkpoints.load_newest(engine)
    state = (resumed or {}).get("feed") or {}
    fates = FateLog(directory / FATES_DIRECTORY, file_lines=config.ledger.fate_file_lines, since=state.get("fate_log"))
    write_resolved(directory, config)  # no other learner works here: the log's lock says so
    reader = Reader(
        streams,
        run=config.run.name,
        group=LEARNER_GROUP,
        consumer="learner-0",
        config=config.stream,
        vocabulary=engine.vocabulary,
        ledger_every_s=config.ledger.check_every_s,
    )
    feed = Feed(
        reader,
        hub.permits,
        fates,
        batch_groups=config.learner.groups_per_step,
        max_age=config.correction.max_age,
        block_ms=config.stream.block_ms,
        hub_deadline_s=config.channel.connect_deadline_s,
        resumed=state,
        why=NoProgress(hub.runs, hub.permits),
        heartbeat=heartbeat,
    )
    metrics = MetricsLog(directory)
    loop = LearnerLoop(
        engine,
        feed,
        hub,
        checkpoints,
        RunMemory(directory),
        metrics,
        config,
        watch=LedgerWatch(reader, fates),
        resumed=resumed,
        recorder=recorder,
        heartbeat=heartbeat,
    )
    sd_notify("READY=1")
    try:
        log.info("learner ends", reason=loop.run(stop.is_set))
    finally:
        feed.close()
        metrics.close()
    return 0
