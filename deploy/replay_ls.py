"""`anabranch replay ls`: which trajectories there are, a page at a time.

Invariant: pages do not overlap and leave nothing out, as long as the run stands still: rows have a total order. Held by
tests/unit/cli/test_replay_look.py.
"""

from __future__ import annotations

import json
from typing import Any

from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.trajectory_filter import TrajectoryFilter, order_by
from anabranch.deploy.plain_text import plain
from anabranch.deploy.replay_text import fate, fit, json_value, number, table, versions

NARROW = (
    "id", "run", "region", "producer", "seq", "sample_index", "group_index", "attempt", "entry_id", "appended_ms", "epoch",
    "epoch_min", "version_min", "version_max", "tokens", "reward", "finish_reason", "group_size", "started_ms", "finished_ms",
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


def render(rows: list[dict[str, Any]], total: int, *, limit: int, page: int, width: int) -> str:
    if not rows:
        return f"no trajectory on page {page}: {total:,} fit" if total else "no trajectory fits"
    cells = [
        [plain(row["id"] or "?"), fate(row["fate"]), number(row["step"]), number(row["age"]), versions(row), number(row["reward"]),
         number(row["advantage"], 3), number(row["tokens"])]
        for row in rows
    ]  # fmt: skip
    lines = table(["id", "fate", "step", "age", "sampled by", "reward", "advantage", "tokens"], cells, left=(0, 1, 4))
    start = max(map(len, lines)) + 2
    if width - start >= 8:
        texts = ["text", *(plain(row["snippet"]) for row in rows)]
        lines = [f"{line:<{start}}{fit(text, width - start)}".rstrip() for line, text in zip(lines, texts, strict=True)]
    first = (page - 1) * limit + 1
    more = f"; --page {page + 1} has more" if first + len(rows) - 1 < total else ""
    return "\n".join([*lines, "", f"{first:,} to {first + len(rows) - 1:,} of {total:,}{more}"])


def json_lines(rows: list[dict[str, Any]]) -> str:
    return "\n".join(json.dumps(json_value(row)) for row in rows)
