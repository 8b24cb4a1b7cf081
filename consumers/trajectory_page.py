"""Recorded trajectories as people look at them: a page of a table, and all that there is of one group.

Invariant: pages do not overlap and leave nothing out, as long as the run stands still: rows have a total order. Held by
tests/unit/cli/test_replay_look.py and tests/unit/consumers/test_viewer_table.py.
"""

from __future__ import annotations

from typing import Any

from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.trajectory_filter import TrajectoryFilter, order_by
from anabranch.schemas.trajectory_id import TrajectoryId

NARROW = (
    "id", "run", "region", "producer", "seq", "sample_index", "group_index", "attempt", "entry_id", "appended_ms", "epoch",
    "epoch_min", "version_min", "version_max", "tokens", "reward", "finish_reason", "group_size", "permit_ms", "started_ms",
    "finished_ms", "scored_ms", "spooled_ms", "delivered_ms", "admitted_ms",
    "fate", "fate_time_ms", "step", "train_epoch", "train_version", "age", "advantage", "weight", "ratio_mean", "ratio_max",
    "kept_fraction", "loss_share",
)  # fmt: skip
DEEP = 2_000  # rows before a page from which on it is found by its keys
SNIPPET = 160  # characters of a completion that a table can show


def page(
    reader: RunReader, wanted: TrajectoryFilter, *, sort: str, limit: int, number: int = 1
) -> tuple[list[dict[str, Any]], int]:
    """Rows of the page (`NARROW`, and `snippet`), and how many fit the filter. Raises UsageError: nothing to sort by."""
    where, values = wanted.where()
    order = order_by(sort)
    offset = int(limit) * (number - 1)
    window = f"ORDER BY {order} LIMIT {int(limit)} OFFSET {offset}"
    columns = f"{', '.join(NARROW)}, left(text, {SNIPPET}) AS snippet"
    if offset < DEEP:
        rows = reader.rows(f"SELECT {columns} FROM trajectories WHERE {where} {window}", values)
    else:  # which rows first, for all that stands before them is sorted too; then what they hold
        found = f"SELECT region, entry_id, sample_index FROM trajectories WHERE {where} {window}"
        rows = reader.rows(
            f"SELECT {columns} FROM trajectories SEMI JOIN ({found}) USING (region, entry_id, sample_index) ORDER BY {order}",
            values,
        )
    (total,) = reader.rows(f"SELECT count(*) AS n FROM trajectories WHERE {where}", values)
    return rows, total["n"]


def read_group(reader: RunReader, one: TrajectoryId) -> list[dict[str, Any]]:
    """All columns of the group's rollouts, in order of the samples; of one rollout if `one` has a sample."""
    only = "" if one.sample is None else " AND sample_index = ?"
    values = [*one.identity, *([] if one.sample is None else [one.sample])]
    return reader.rows(
        f"SELECT * FROM trajectories WHERE region = ? AND producer = ? AND seq = ?{only} ORDER BY sample_index", values
    )
