"""Trajectory batches to Parquet files, one partition per region.

Invariant: a file that exists under its final name is complete (written aside, fsynced, renamed), and an entry is in at
most one file: files are named by the first and last entry id they hold, and `recorded` tells which entries of a range
are on disk already, so a recorder that died between writing and acknowledging writes nothing twice. Held by
tests/unit/consumers/test_parquet_writer.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.transport.files import sync_directory

Entry = tuple[str, pa.RecordBatch]  # (entry id, rows)


def id_key(entry_id: str) -> tuple[int, int]:
    """Redis stream ids ("milliseconds-sequence") in stream order."""
    ms, _, seq = entry_id.partition("-")
    return int(ms), int(seq or 0)


def write_entries(directory: Path, region: str, entries: list[Entry]) -> Path:
    """Write `entries` (in stream order, at least one) to one new file and return its path. Raises OSError."""
    folder = directory / f"region={region}"
    folder.mkdir(parents=True, exist_ok=True)
    tables = [
        pa.Table.from_batches([batch.drop_columns(["region"])]).append_column(
            pa.field("entry_id", pa.string(), False), pa.array([entry_id] * batch.num_rows)
        )
        for entry_id, batch in entries
    ]
    table = pa.concat_tables(tables).replace_schema_metadata(None)
    ids = sorted((entry_id for entry_id, _ in entries), key=id_key)
    final = folder / f"{ids[0]}_{ids[-1]}.parquet"
    aside = final.with_suffix(".tmp")
    try:
        with aside.open("wb") as file:
            pq.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        os.rename(aside, final)
    except OSError:  # most likely the disk is full: give back what the torn file holds
        aside.unlink(missing_ok=True)
        raise
    sync_directory(folder)
    return final


def recorded(directory: Path, region: str, entry_ids: Iterable[str]) -> set[str]:
    """Those of `entry_ids` that a file of `region` holds already."""
    wanted = set(entry_ids)
    found: set[str] = set()
    if not wanted:
        return found
    low, high = min(map(id_key, wanted)), max(map(id_key, wanted))
    for path in sorted((directory / f"region={region}").glob("*.parquet")):
        first, _, last = path.stem.partition("_")
        if id_key(last) < low or id_key(first) > high:
            continue
        column = pq.read_table(path, columns=["entry_id"]).column("entry_id")
        found |= wanted & set(column.to_pylist())
    return found


def remove_leftovers(directory: Path) -> int:
    """Delete half-written files of a recorder that died; returns how many."""
    leftovers = list(directory.glob("region=*/*.tmp"))
    for path in leftovers:
        path.unlink()
    return len(leftovers)
