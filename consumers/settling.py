"""Joins to a recorded file what the learner logged of its rows, once all of it is known.

Invariant: a settled file has the rows that it had, in their order, and every one of them its fate; what a step made of a rollout is
joined from the record of the very step that the fate names, so a step that was given up leaves nothing. Written aside and renamed: a reader
finds the file as it was or as it is. Held by tests/unit/consumers/test_settling.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.consumers.parquet_writer import write_table
from anabranch.consumers.recorded_files import RecordedFile
from anabranch.consumers.step_records import StepPlace, read_facts, read_rollouts
from anabranch.schemas.errors import StepRecordError
from anabranch.schemas.fates import CONSUMED, Identity
from anabranch.schemas.step_record import FACTS_FILE, ROLLOUT_SCHEMA, step_folder

STEP_PATIENCE_MS = 300_000  # a fate that is so old waits for the record of its step no longer
_FATE_COLUMNS = {
    "fate": ("fate", pa.string()), "fate_time_ms": ("time_ms", pa.int64()), "delivered_ms": ("delivered_ms", pa.int64()),
    "admitted_ms": ("admitted_ms", pa.int64()), "train_epoch": ("epoch", pa.int32()),
    "train_version": ("version", pa.int64()), "age": ("age", pa.int32()),
}  # fmt: skip
# column -> of a step's record
_STEP_COLUMNS = {
    "advantage": "advantage", "weight": "weight", "ratio_mean": "ratio_mean", "ratio_max": "ratio_max",
    "kept_fraction": "kept_fraction", "loss_share": "loss_share", "learner_logprobs": "logprob", "entropy": "entropy",
    "factor": "factor", "kept": "kept",
}  # fmt: skip
_KEYS = ("region", "producer", "seq", "sample_index")
Fates = Mapping[Identity, Mapping[str, Any]]


def names_in(file: RecordedFile) -> set[Identity]:
    """The groups of a file. Raises OSError, ArrowException."""
    table = pq.read_table(file.path, columns=["producer", "seq"], partitioning=None)
    pairs = set(zip(table["producer"].to_pylist(), table["seq"].to_pylist(), strict=True))
    return {(file.partition.region, producer, seq) for producer, seq in pairs}


@dataclass(slots=True)
class StepRows:
    """The rows of recorded steps; the newest few are kept, since the groups of a file are of few steps."""

    run_directory: Path
    most: int = 8
    _kept: dict[tuple[int, int], pa.Table] = field(default_factory=dict)

    def read(self, epoch: int, step: int) -> pa.Table | None:
        """None: that step has no record, or it is damaged."""
        key = (epoch, step)
        if key not in self._kept:
            folder = self.run_directory / step_folder(epoch, step)
            if not (folder / FACTS_FILE).is_file():
                return None
            place = StepPlace(epoch, step, folder)
            try:
                self._kept[key] = read_rollouts(place, read_facts(place), [*_KEYS, *_STEP_COLUMNS.values()])
            except StepRecordError:
                return None
            while len(self._kept) > self.most:
                del self._kept[next(iter(self._kept))]
        return self._kept[key]


def settle(file: RecordedFile, fates: Fates, steps: StepRows, *, now_ms: int) -> bool:
    """Rewrite `file` in place if all that belongs to its rows is known; whether it was.

    A consumed group whose step has no record `STEP_PATIENCE_MS` after its fate gets nulls for what the step made of it.
    Raises OSError: the disk is full, for example; the file is as it was.
    """
    table = pq.read_table(file.path, partitioning=None)
    keys = list(
        zip([file.partition.region] * len(table), *(table[name].to_pylist() for name in _KEYS[1:]), strict=True)
    )
    if any(key[:3] not in fates for key in keys):
        return False
    found = _rows_of_steps({_step_of(fates[key[:3]]) for key in keys} - {None}, steps)
    rollouts = pa.concat_tables(
        [ROLLOUT_SCHEMA.empty_table().select([*_KEYS, *_STEP_COLUMNS.values()]), *found.values()]
    )
    place, at = {}, 0
    for step, rows in found.items():
        for key in zip(*(rows[name].to_pylist() for name in _KEYS), strict=True):
            place[step, key] = at
            at += 1
    indices = []
    for key in keys:
        fate = fates[key[:3]]
        step = _step_of(fate)
        index = None if step is None else place.get((step, key))
        if step is not None and step not in found and now_ms - fate["time_ms"] < STEP_PATIENCE_MS:
            return False
        indices.append(index)
    joined = _joined(table, [fates[key[:3]] for key in keys], rollouts.take(pa.array(indices, pa.int64())))
    write_table(joined, file.path)
    return True


def _step_of(fate: Mapping[str, Any]) -> tuple[int, int] | None:
    """(epoch, step) that consumed it."""
    return (fate["epoch"], fate["version"] + 1) if fate["fate"] in CONSUMED else None


def _rows_of_steps(wanted: Iterable[tuple[int, int] | None], steps: StepRows) -> dict[tuple[int, int], pa.Table]:
    rows = {step: steps.read(*step) for step in sorted(s for s in wanted if s is not None)}
    return {step: table for step, table in rows.items() if table is not None}


def _joined(table: pa.Table, fates: list[Mapping[str, Any]], rollouts: pa.Table) -> pa.Table:
    table = table.drop_columns(
        [name for name in (*_FATE_COLUMNS, "step", *_STEP_COLUMNS) if name in table.column_names]
    )
    for name, (source, kind) in _FATE_COLUMNS.items():
        table = table.append_column(name, pa.array([fate[source] for fate in fates], kind))
    steps = [None if (step := _step_of(fate)) is None else step[1] for fate in fates]
    table = table.append_column("step", pa.array(steps, pa.int64()))
    for name, source in _STEP_COLUMNS.items():
        table = table.append_column(name, rollouts[source])
    return table
