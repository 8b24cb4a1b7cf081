"""One rank of a tiny learner, for test_learner_engine.py: `python learner_rank.py JOB.json`.

A job lists runs, done one after the other by the same ranks: starting processes costs more than training.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the tests' own helpers: python -I leaves the folder out


def main(job_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    if job["what"] == "hang":
        Path(job["out"], f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
        time.sleep(300)
    elif job["what"] == "fail":
        if os.environ["RANK"] == "1":
            sys.exit(75)
        time.sleep(300)
    else:
        from anabranch.learner.distribute import leave_ranks

        for run in job["runs"]:
            train(Path(run.pop("model", job["model"])), **run)
        leave_ranks(0)


def train(
    model: Path,
    out: str,
    learner: dict[str, Any],
    batches: list[str],
    save_at: int | None = None,
    hub: str | None = None,
    run: str = "r",
    record: bool = False,
) -> None:
    """Resume if there is a checkpoint in `out`, do the steps that are left, write weights and figures. With the URL of a
    `hub` every version is published there, as that of `run`; with `record` every step is recorded below `out`."""
    from anabranch.learner.batch import TrainBatch
    from anabranch.learner.checkpoint import CheckpointStore
    from anabranch.learner.collective import CollectiveEngine, follow
    from anabranch.learner.distribute import rank_from_environment
    from anabranch.learner.engine import LearnerEngine
    from anabranch.learner.publish_order import EpochOpening
    from anabranch.learner.step_recorder import StepRecorder
    from anabranch.learner.weight_publisher import WeightPublisher
    from anabranch.schemas.config import CorrectionSection, LearnerSection, load_config
    from anabranch.transport.wiring import connect_hub
    from tests.publishers import digest_of
    from tests.record_orders import order_of

    rank, world_size = rank_from_environment() or (0, 1)
    overrides = [f"run.name={run}", f"run.dir={Path(out).parent}", f"model.path={model}"]
    overrides += [f"learner.{key}={value}" for key, value in {**learner, "world_size": world_size}.items()]
    overrides += ["correction.veto_low=0.0", "correction.veto_high=1e9"]
    recorder = StepRecorder(load_config("", overrides=overrides), rank) if record else None
    made = LearnerEngine(
        model,
        LearnerSection(**learner, world_size=world_size),
        CorrectionSection(veto_low=0.0, veto_high=1e9),
        run_seed=0,
        temperature=1.0,
        rank=rank,
        world_size=world_size,
        recorder=recorder,
    )

    def make_publisher(engine: LearnerEngine, opening: EpochOpening) -> WeightPublisher:
        config = load_config("", overrides=[f"hub.url={hub}", f"run.name={run}"])
        return WeightPublisher(engine.share, lambda: connect_hub(config), config.channel, opening)

    if rank:
        follow(made, make_publisher)
        if recorder:
            recorder.close()
        return
    engine = CollectiveEngine(made, world_size=world_size, make_publisher=make_publisher)
    folder, digests = Path(out), []
    folder.mkdir(exist_ok=True)
    checkpoints = CheckpointStore(folder / "checkpoints", run=run, layout_hash=engine.layout.hash, keep=1)
    try:
        resumed = checkpoints.load_newest(engine)
        outputs = []
        publisher = engine.open_epoch(EpochOpening(run, 1, engine.step, engine.step)) if hub else None
        digests = [digest_of(engine.layout, engine.state_bits())]
        for file in batches[engine.step :]:
            batch = TrainBatch.from_bytes(Path(file).read_bytes())
            outputs.append(engine.train_step(batch, order_of(batch, version=engine.step) if record else None))
            if publisher:
                engine.publish(publisher, engine.step)
            digests.append(digest_of(engine.layout, engine.state_bits()))
            if engine.step == save_at:
                checkpoints.save(engine, {"epoch": 1 if record else 3})
        np.savez(folder / "weights.npz", **engine.state_bits())
        checkpoints.export(engine)
        if publisher:
            publisher.drain()
            publisher.close()
    finally:
        engine.stop()
        if recorder:
            recorder.close()
    totals = [output.diagnostics.total for output in outputs]
    report = {
        "resumed": resumed,
        "digests": digests,
        "loss": [o.loss for o in outputs],
        "grad_norm": [o.grad_norm for o in outputs],
        "kl_k3": [total.kl_k3 if total else 0.0 for total in totals],
        "tokens": [total.tokens if total else 0 for total in totals],
    }
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
