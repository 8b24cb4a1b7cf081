"""From an entry to the rows that a recorder keeps of it, and the partition that they belong to. Pure.

Invariant: a row says all that its trajectory said, and what can be told of it at once (versions, length, entry); what comes later, its
fate and what a step made of it, is no column yet. Whatever an entry claims, its partition has a name that
`recorded_files.parse_name` reads. Held by tests/unit/consumers/test_recorded_rows.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from anabranch.consumers.recorded_files import Partition, id_key

Name = tuple[str, int]  # producer, as the rows have it, and seq
_IN_PATH = ("run", "region")
_LAST_DAY, _LAST_EPOCH = "9999-12-31", 999_999_999


@dataclass(frozen=True, slots=True)
class Entry:
    """`rows`: the record batch of the group, of any minor version, `named` as its envelope is."""

    entry_id: str
    seq: int
    rows: pa.RecordBatch

    @property
    def name(self) -> Name:
        return self.rows.column("producer")[0].as_py(), self.seq


def partition_of(entry: Entry, *, run: str, region: str) -> Partition:
    """By the newest epoch that sampled a token of the group, and the day (UTC) on which it was appended."""
    _, highest = _extremes(entry.rows.column("version_spans"), "epoch")
    return Partition(run, min(int(highest.max()), _LAST_EPOCH), _day(entry.entry_id), region)


def rows_of(entry: Entry) -> pa.Table:
    """Columns of the trajectory but for run and region, which are in the path; `seq`, `entry_id`, `epoch_min`, `version_min`, `version_max`, `tokens`."""
    table = pa.Table.from_batches([entry.rows.drop_columns(list(_IN_PATH))]).replace_schema_metadata(None)
    spans, count = entry.rows.column("version_spans"), table.num_rows
    epochs, _ = _extremes(spans, "epoch")
    low, high = _extremes(spans, "version")
    tokens = pc.list_value_length(entry.rows.column("token_ids"))
    for name, values, kind in (
        ("seq", np.full(count, entry.seq), pa.int64()),
        ("entry_id", [entry.entry_id] * count, pa.string()),
        ("epoch_min", epochs, pa.int32()),
        ("version_min", low, pa.int64()),
        ("version_max", high, pa.int64()),
        ("tokens", tokens, pa.int32()),
    ):
        table = table.append_column(pa.field(name, kind, False), pa.array(values, kind))
    return table


def named(rows: pa.RecordBatch, producer: str) -> pa.RecordBatch:
    """`rows` under the name that their envelope gives, by which fates and steps know the delivery: somebody may have appended the
    payload of another producer."""
    at = rows.schema.get_field_index("producer")
    if rows.column(at)[0].as_py() == producer:
        return rows
    return rows.set_column(at, rows.schema.field(at), pa.array([producer] * rows.num_rows))


def _day(entry_id: str) -> str:
    try:
        return datetime.fromtimestamp(id_key(entry_id)[0] / 1000, UTC).strftime("%Y-%m-%d")
    except (ValueError, OverflowError, OSError):  # somebody chose that id
        return _LAST_DAY


def _extremes(spans: pa.ListArray, part: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lowest and highest value of a part of the spans, of each row; a row has at least one span."""
    values = spans.flatten().field(part).to_numpy(zero_copy_only=False).astype(np.int64)
    starts = np.cumsum(spans.value_lengths().to_numpy(zero_copy_only=False)) - spans.value_lengths().to_numpy()
    return np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
