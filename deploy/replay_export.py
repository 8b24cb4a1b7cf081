"""`anabranch replay export`: recorded trajectories as JSON lines, Parquet or safetensors.

Invariant: the file appears under its name whole, or not at all; rows are those that `ls` with the same filters finds, in the order
of appending, whatever the format. Held by tests/unit/deploy/test_replay_export.py.

safetensors knows no ragged arrays: `token_ids` of all rows are one tensor, and `token_offsets` (rows + 1) says where each row
begins; so it is with log-probs, versions, prompts and ids.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.run_views import TRAJECTORY_COLUMNS
from anabranch.consumers.trajectory_filter import TrajectoryFilter
from anabranch.deploy.replay_text import json_value
from anabranch.schemas.errors import TemporaryError, UsageError
from anabranch.transport.aside import Aside

FORMATS = ("jsonl", "parquet", "safetensors")
MAX_TENSOR_BYTES = 4 * 2**30  # of one safetensors file, which is made in memory
_NUMBERS = (
    "reward",
    "advantage",
    "weight",
    "step",
    "age",
    "group_index",
    "sample_index",
    "group_size",
    "seq",
    "appended_ms",
)


def export(
    reader: RunReader,
    wanted: TrajectoryFilter,
    target: Path,
    *,
    form: str | None = None,
    columns: Sequence[str] | None = None,
    limit: int | None = None,
    replace: bool = False,
) -> int:
    """Write `target` ("-": JSON lines to the output) and return how many rows it has.

    Raises:
        UsageError: no such format or column; `target` exists and `replace` is not set.
        TemporaryError: too much for a safetensors file.
        OSError: it cannot be written.
    """
    form = form or _format_of(target)
    if form == "safetensors" and columns is not None:
        raise UsageError("--columns goes with jsonl and parquet: a safetensors file has fixed tensors")
    where, values = wanted.where()
    names = checked_columns(columns)
    sql = (
        f"SELECT {', '.join(names)} FROM trajectories WHERE {where} "
        f"ORDER BY appended_ms, region, producer, seq, sample_index{'' if limit is None else f' LIMIT {int(limit)}'}"
    )
    with reader.batches(sql, values) as batches:
        if str(target) == "-":
            if form != "jsonl":
                raise UsageError(f"{form} goes to a file, not to the output")
            return _write_lines(batches, sys.stdout.buffer)
        with Aside(target) as aside:
            count = _WRITERS[form](batches, aside.path)
            aside.commit(replace=replace)
    return count


def checked_columns(columns: Sequence[str] | None) -> list[str]:
    """Raises UsageError: a column that trajectories have not."""
    for name in columns or ():
        if name not in TRAJECTORY_COLUMNS:
            near = difflib.get_close_matches(name, TRAJECTORY_COLUMNS, n=1, cutoff=0.0)
            raise UsageError(f"trajectories have no column {name[:80]!r}; did you mean {near[0]!r}?")
    return list(columns or TRAJECTORY_COLUMNS)


def _format_of(target: Path) -> str:
    form = "jsonl" if str(target) == "-" else target.suffix.removeprefix(".")
    if form not in FORMATS:
        raise UsageError(f"{target}: give --format, or a name that ends in .{', .'.join(FORMATS)}")
    return form


def _write_lines(batches: pa.RecordBatchReader, out: Any) -> int:
    count = 0
    for batch in batches:
        for row in batch.to_pylist():
            out.write(json.dumps(json_value(row)).encode() + b"\n")
        count += batch.num_rows
    return count


def _jsonl(batches: pa.RecordBatchReader, path: Path) -> int:
    with path.open("r+b") as file:  # the locked file itself, which is there and empty
        return _write_lines(batches, file)


def _parquet(batches: pa.RecordBatchReader, path: Path) -> int:
    count = 0
    with path.open("r+b") as file, pq.ParquetWriter(file, batches.schema, compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(batch)
            count += batch.num_rows
    return count


def _safetensors(batches: pa.RecordBatchReader, path: Path) -> int:
    from safetensors.numpy import save

    parts: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        size += batch.nbytes
        if size > MAX_TENSOR_BYTES:
            raise TemporaryError(f"more than {MAX_TENSOR_BYTES:,} bytes: narrow the filters, or export to Parquet")
        parts.append(batch)
    table = pa.Table.from_batches(parts, batches.schema)
    with path.open("r+b") as file:
        file.write(
            save(tensors_of(table), metadata={"format": "anabranch.trajectories/1", "rows": str(table.num_rows)})
        )
    return table.num_rows


def tensors_of(table: pa.Table) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a safetensors file. Nulls are NaN in float tensors and −1 in others; ids are bytes of text."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for name in _NUMBERS:
        column = table.column(name)
        floats = pa.types.is_floating(column.type)
        found[name] = (
            column.fill_null(float("nan") if floats else -1).to_numpy().astype(np.float64 if floats else np.int64)
        )
    _ragged(found, table, "token_ids", "token_offsets", np.int32)
    _ragged(found, table, "logprobs", None, np.float32)
    _ragged(found, table, "prompt_token_ids", "prompt_offsets", np.int32)
    learner = table.column("learner_logprobs").to_pylist()
    lengths = np.diff(found["token_offsets"])
    if any(one is not None for one in learner):
        rows = [np.full(n, np.nan) if one is None else one for one, n in zip(learner, lengths, strict=True)]
        found["learner_logprobs"] = np.concatenate(rows).astype(np.float32)
    epochs, versions = _policies(table.column("version_spans").to_pylist(), lengths)
    found |= {"epochs": epochs, "versions": versions}
    ids = [one.encode() for one in table.column("id").to_pylist()]
    found["id_bytes"] = np.frombuffer(b"".join(ids), np.uint8).copy()
    found["id_offsets"] = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    return found


def _ragged(found: dict[str, np.ndarray[Any, Any]], table: pa.Table, name: str, offsets: str | None, kind: Any) -> None:
    rows = table.column(name).to_pylist()
    found[name] = np.concatenate([np.asarray(row, kind) for row in rows]) if rows else np.empty(0, kind)
    if offsets is not None:
        found[offsets] = np.cumsum([0, *map(len, rows)], dtype=np.int64)


def _policies(spans: list[Any], lengths: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Per token of all rows: epoch int32, version int64."""
    epochs, versions = [], []
    for row, length in zip(spans, lengths, strict=True):
        counts = np.diff([*(span["start"] for span in row), length])
        epochs.append(np.repeat(np.array([span["epoch"] for span in row], np.int32), counts))
        versions.append(np.repeat(np.array([span["version"] for span in row], np.int64), counts))
    return (
        np.concatenate(epochs) if epochs else np.empty(0, np.int32),
        np.concatenate(versions) if versions else np.empty(0, np.int64),
    )


_WRITERS = {"jsonl": _jsonl, "parquet": _parquet, "safetensors": _safetensors}
