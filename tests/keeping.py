"""A run directory as recorder and learner leave it, for what looks after the recorder's files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from anabranch.consumers.parquet_writer import write_entries
from anabranch.consumers.recorded_files import RecordedFile, recorded_files
from anabranch.consumers.recorded_rows import Entry, partition_of
from anabranch.schemas.fates import FateRecord
from anabranch.schemas.trajectory import encode_group, read_batch
from tests.groups import group
from tests.step_records import facts, group_facts, row, write_rank


def write_groups(run: Path, *indices: int, epoch: int = 1, region: str = "east") -> RecordedFile:
    """One file; group `index` is entry INDEX-0 of producer p."""
    entries = [
        Entry(f"{1000 + i}-0", i, read_batch(encode_group(group(i, epoch=epoch, region=region)))) for i in indices
    ]
    partition = partition_of(entries[0], run="run", region=region)
    path = write_entries(run / "trajectories", partition, entries)
    (found,) = [file for file in recorded_files(run / "trajectories") if file.path == path]
    return found


def fate_of(
    index: int, fate: str = "trained", *, version: int = 3, epoch: int = 1, region: str = "east", time_ms: int = 1
) -> FateRecord:
    return FateRecord(
        region=region, producer="p", seq=index, group_index=index, attempt=0, fate=fate, epoch=epoch, version=version, age=1,
        rollouts=2, tokens=4, cut=0, reward=0.5, time_ms=time_ms,
    )  # fmt: skip


def log_fates(run: Path, *fates: FateRecord) -> None:
    (run / "fates").mkdir(parents=True, exist_ok=True)
    with (run / "fates/000001.jsonl").open("ab") as file:
        for fate in fates:
            file.write(fate.line())


def record_step(run: Path, *indices: int, version: int = 3, epoch: int = 1, weight: float = 0.25) -> None:
    """A whole record of the step that consumed these groups."""
    groups = [group_facts(i).model_copy(update={"producer": "p"}) for i in indices]
    made = facts(
        groups=groups,
        epoch=epoch,
        version_before=version,
        step=version + 1,
        now=f"e{epoch}.v{version}",
        forks={epoch: 0},
    )
    rows = [row(2 * at + sample, one, sample, weight=weight) for at, one in enumerate(groups) for sample in range(2)]
    folder = run / f"steps/epoch={epoch}/{version + 1:06d}"
    write_rank(folder, 0, rows)
    (folder / "facts.json").write_bytes(made.to_json())


def rows_that_count(run: Path) -> list[dict[str, Any]]:
    files = recorded_files(run / "trajectories")
    return [r for f in files for r in pq.read_table(f.path, partitioning=None).to_pylist()]


def counted(run: Path) -> Counter[tuple[int, int]]:
    """(seq, sample) -> how often it counts."""
    return Counter((r["seq"], r["sample_index"]) for r in rows_that_count(run))


def once(indices: Iterable[int]) -> Counter[tuple[int, int]]:
    return Counter({(i, s): 1 for i in indices for s in range(2)})
