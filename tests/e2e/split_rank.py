"""One rank of many small trainings, for test_rank_splits.py: `python split_rank.py JOB.json`.

A job lists runs, done one after the other by the same ranks: starting processes costs more than training. What a rank above 0
is sent is noted, to show that it is its share and nothing else.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the tests' own helpers: python -I leaves the folder out


def main(job_file: str) -> None:
    """Writes `report.json`, `RUN.npz` (rank 0), and `sent-RANK.json` (the others) to the job's `out`."""
    from anabranch.learner import collective
    from anabranch.learner.distribute import leave_ranks
    from anabranch.learner.step import StepShare

    job = json.loads(Path(job_file).read_text())
    out = Path(job["out"])
    sent: list[dict[str, Any]] = []
    receive, broadcast = collective.receive_bytes, collective.broadcast_bytes

    def receive_and_note() -> bytes:
        data = receive()
        micros = [micro for update in StepShare.from_bytes(data).updates for micro in update.microbatches]
        sent.append(
            {"bytes": len(data), "rows": [row for micro in micros if micro.real for row in micro.rollouts.tolist()]}
            | {"positions": sum(micro.input_ids.size for micro in micros if micro.real)}
            | {"targets of passes without rollouts": [micro.targets.size for micro in micros if not micro.real]}
        )
        return data

    def broadcast_and_note(data: bytes | None) -> bytes:
        heard = broadcast(data)
        if heard[0] == collective.Op.STEP:
            sent.append({"announced": len(heard)})
        return heard

    collective.receive_bytes, collective.broadcast_bytes = receive_and_note, broadcast_and_note
    reports = {}
    for name, run in job["runs"].items():
        sent.clear()
        reports[name] = train(Path(job["model"]), out / f"{name}.npz", **run)
        if (rank := os.environ["RANK"]) != "0":
            (out / f"{name}.sent-{rank}.json").write_text(json.dumps(sent))
    if os.environ["RANK"] == "0":
        (out / "report.json").write_text(json.dumps(reports))
    leave_ranks(0)


def train(
    model: Path,
    weights: Path,
    *,
    learner: dict[str, Any],
    batches: list[str],
    correction: dict[str, Any] | None = None,
    gates: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Train one step on each of `batches`; write the weights; returns the figures of each step (of rank 0)."""
    from anabranch.learner.batch import TrainBatch
    from anabranch.learner.collective import CollectiveEngine, follow
    from anabranch.learner.distribute import rank_from_environment
    from anabranch.learner.engine import LearnerEngine
    from anabranch.schemas.config import CorrectionSection, GateSection, LearnerSection

    rank, world_size = rank_from_environment() or (0, 1)
    made = LearnerEngine(
        model,
        LearnerSection(**learner, world_size=world_size),
        CorrectionSection(**{"veto_low": 0.0, "veto_high": 1e9} | (correction or {})),
        GateSection(**gates or {}),
        run_seed=0,
        temperature=1.0,
        rank=rank,
        world_size=world_size,
    )
    if rank:
        follow(made)
        return []
    engine = CollectiveEngine(made, world_size=world_size)
    try:
        outputs = [engine.train_step(TrainBatch.from_bytes(Path(file).read_bytes())) for file in batches]
        np.savez(weights, **engine.state_bits())
    finally:
        engine.stop()
    return [
        {"loss": o.loss, "grad_norm": o.grad_norm, "skipped": o.skipped_groups}
        | {"masked": o.diagnostics.total.masked_fraction if o.diagnostics.total else None}
        for o in outputs
    ]


if __name__ == "__main__":
    main(sys.argv[1])
