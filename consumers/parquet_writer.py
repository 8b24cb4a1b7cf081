"""Trajectory batches to Parquet files, one partition per region.

Invariant: a file that exists under its final name is complete (written aside, fsynced, renamed), and an entry is in at
most one file: files are named by the first and last entry id they hold, and `recorded` tells which entries of a range
are on disk already, so a recorder that died between writing and acknowledging writes nothing twice. A group is known by its
producer and seq too (`newest_names`), since a server that forgot it gets it again under another entry id. Held by
tests/unit/consumers/test_parquet_writer.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.consumers.recorded_files import id_key
from anabranch.transport.files import sync_directory

Name = tuple[str, int]  # producer, as the rows have it, and seq


@dataclass(frozen=True, slots=True)
class Entry:
    entry_id: str
    seq: int
    rows: pa.RecordBatch

    @property
    def name(self) -> Name:
        return self.rows.column("producer")[0].as_py(), self.seq


def write_entries(directory: Path, region: str, entries: list[Entry]) -> Path:
    """Write `entries` (in stream order, at least one) to one new file and return its path. Raises OSError."""
    folder = directory / f"region={region}"
    folder.mkdir(parents=True, exist_ok=True)
    tables = [pa.Table.from_batches([entry.rows.drop_columns(["region"])]) for entry in entries]
    counts = [table.num_rows for table in tables]
    table = pa.concat_tables(tables).replace_schema_metadata(None)
    for name, values, kind in (
        ("entry_id", [entry.entry_id for entry in entries], pa.string()),
        ("seq", [entry.seq for entry in entries], pa.int64()),
    ):
        column = pa.array([value for value, count in zip(values, counts, strict=True) for _ in range(count)], kind)
        table = table.append_column(pa.field(name, kind, False), column)
    ids = sorted((entry.entry_id for entry in entries), key=id_key)
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


def newest_names(directory: Path, region: str, at_least: int) -> list[Name]:
    """Of the groups in the newest files of `region`, oldest first: `at_least` so many, or all there are. Files of an earlier
    version, without `seq`, are passed over."""
    files = sorted((directory / f"region={region}").glob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)
    pages: list[list[Name]] = []
    found = 0
    for path in reversed(files):
        if "seq" not in pq.read_schema(path).names:
            continue
        table = pq.read_table(path, columns=["producer", "seq"], partitioning=None)
        pages.append(list(dict.fromkeys(zip(table["producer"].to_pylist(), table["seq"].to_pylist(), strict=True))))
        found += len(pages[-1])
        if found >= at_least:
            break
    return [name for page in reversed(pages) for name in page]


def remove_leftovers(directory: Path) -> int:
    """Delete half-written files of a recorder that died; returns how many."""
    leftovers = list(directory.glob("region=*/*.tmp"))
    for path in leftovers:
        path.unlink()
    return len(leftovers)
