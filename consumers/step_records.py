"""The step records in a run directory, as anybody may read them.

Invariant: only whole records count: those whose facts are there. Reading changes nothing, and takes a directory that a learner
writes to. A record that is damaged, or of another step than its folder says, is refused by name. Held by
tests/unit/consumers/test_step_records.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.schemas.errors import StepRecordError
from anabranch.schemas.step_record import (
    FACTS_FILE,
    ROLLOUT_SCHEMA,
    STEPS_DIRECTORY,
    StepFacts,
    parse_facts,
    parse_folder,
    rank_file,
)


@dataclass(frozen=True, slots=True, order=True)
class StepPlace:
    """A whole record: sorts by epoch, then by step."""

    epoch: int
    step: int
    folder: Path


def recorded_steps(run_directory: Path) -> list[StepPlace]:
    """Every whole record, sorted."""
    return [place for place in step_folders(run_directory) if (place.folder / FACTS_FILE).is_file()]


def step_folders(run_directory: Path) -> list[StepPlace]:
    """Every folder that has a record's name, whole or not, sorted."""
    root = run_directory / STEPS_DIRECTORY
    found = []
    for epoch in _names(root):
        for step in _names(root / epoch):
            if (named := parse_folder(epoch, step)) is not None:
                found.append(StepPlace(*named, root / epoch / step))
    return sorted(found)


def read_facts(place: StepPlace) -> StepFacts:
    """Raises StepRecordError: there are none, they are damaged, or those of another step."""
    path = place.folder / FACTS_FILE
    try:
        facts = parse_facts(path.read_bytes())
    except (OSError, StepRecordError) as error:
        raise StepRecordError(f"{path}: {error}") from error
    if (facts.epoch, facts.step) != (place.epoch, place.step):
        raise StepRecordError(f"{path} is of epoch {facts.epoch}, step {facts.step}: the folder was renamed")
    return facts


def read_rollouts(place: StepPlace, facts: StepFacts, columns: Sequence[str] | None = None) -> pa.Table:
    """The rollouts of all ranks, `columns` of `ROLLOUT_SCHEMA` (default: all), in the order of the batch's rows.

    Raises StepRecordError: a file is missing or damaged, or a row is not there once.
    """
    names = list(ROLLOUT_SCHEMA.names if columns is None else columns)
    tables = [
        _read(place.folder / rank_file(rank), [*dict.fromkeys([*names, "row"])]) for rank in range(facts.world_size)
    ]
    table = pa.concat_tables(tables).sort_by("row")
    if table.column("row").to_pylist() != list(range(facts.rollouts)):
        raise StepRecordError(
            f"{place.folder} has {table.num_rows} rows, not one for each of {facts.rollouts} rollouts"
        )
    return table.select(names)


def record_bytes(place: StepPlace) -> int:
    """Of all its files; 0 when somebody removed it meanwhile."""
    total = 0
    for name in _names(place.folder):
        try:
            total += os.stat(place.folder / name).st_size
        except OSError:
            continue
    return total


def _read(path: Path, names: Sequence[str]) -> pa.Table:
    try:
        table = pq.read_table(path, columns=list(names), partitioning=None)
        return table.select(names).cast(pa.schema([ROLLOUT_SCHEMA.field(name) for name in names]))
    except (OSError, pa.ArrowException, KeyError) as error:
        raise StepRecordError(f"{path} cannot be read: {error}") from error


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
