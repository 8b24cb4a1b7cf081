"""Step records for tests: facts with made-up numbers, rank files with given rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.schemas.step_record import (
    FACTS_FILE,
    ROLLOUT_SCHEMA,
    GroupFacts,
    StepFacts,
    UpdateResult,
    rank_file,
    step_folder,
)


def group_facts(index: int, *, seq: int | None = None, region: str = "east", rollouts: int = 2) -> GroupFacts:
    return GroupFacts(
        region=region, producer=f"{region}-0-ab", seq=index if seq is None else seq, group_index=index, attempt=0,
        process=f"{region}-77-cd", rollouts=rollouts,
    )  # fmt: skip


def facts(**changes: Any) -> StepFacts:
    loss, norm = 0.1, 1.5
    fields: dict[str, Any] = {
        "run": "run", "epoch": 1, "version_before": 3, "step": 4, "now": "e1.v3", "forks": {1: 0}, "time_ms": 1, "step_s": 0.5,
        "lr": 1e-5, "loss": loss, "loss_bits": loss.hex(), "grad_norm": norm, "grad_norm_bits": norm.hex(),
        "updates": [UpdateResult.of(loss, norm, applied=True)], "groups": [group_facts(8), group_facts(9)],
        "zero_variance": [], "skipped": [], "alarms": [], "settings": {"learner": {"lr": 1e-5}}, "config_digest": "ab",
        "world_size": 1, "zero_stage": 1, "dtype": "bfloat16", "compute_dtype": "float32", "device": "cpu", "threads": 1,
        "packages": {"torch": "2"}, "cpu": "one", "tokens": True,
    }  # fmt: skip
    return StepFacts.model_validate(fields | changes)


def row(place: int, group: GroupFacts, sample: int, **changes: Any) -> dict[str, Any]:
    """A rollout of two tokens."""
    fields: dict[str, Any] = {
        "region": group.region, "producer": group.producer, "seq": group.seq, "group_index": group.group_index,
        "sample_index": sample, "row": place, "update": 0, "applied": True, "tokens": 2, "age_max": 1, "advantage": 0.5,
        "weight": 0.25, "ratio_mean": 1.0, "ratio_max": 1.0, "kept_fraction": 1.0, "loss_share": -0.1,
        "logprob": [-0.5, -1.0], "proximal": None, "entropy": [1.0, 2.0], "factor": [1.0, None], "kept": [True, False],
    }  # fmt: skip
    return fields | changes


def rows_of(made: StepFacts) -> list[dict[str, Any]]:
    places = [(group, sample) for group in made.groups for sample in range(group.rollouts)]
    return [row(place, group, sample) for place, (group, sample) in enumerate(places)]


def write_rank(folder: Path, rank: int, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, ROLLOUT_SCHEMA), folder / rank_file(rank))


def write_record(run_directory: Path, made: StepFacts, rows: list[dict[str, Any]] | None = None) -> Path:
    """Rows are dealt out to the ranks in turn."""
    folder = run_directory / step_folder(made.epoch, made.step)
    rows = rows_of(made) if rows is None else rows
    for rank in range(made.world_size):
        write_rank(folder, rank, rows[rank :: made.world_size])
    (folder / FACTS_FILE).write_bytes(made.to_json())
    return folder
