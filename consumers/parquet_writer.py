"""Recorded rows to Parquet files, one partition a file, and what is in the files already.

Invariant: a file that exists under its final name is complete (written aside, fsynced, renamed), and an entry is in at
most one file: files are named by the first and last entry id they hold, and `recorded` tells which deliveries are on disk already, so a recorder that died between writing and acknowledging writes nothing twice. A group is known by its
producer and seq too (`newest_names`), since a server that forgot it gets it again under another entry id. No file is given a name that
a merged one covers, which would hide it (`recorded_files.split`). Held by
tests/unit/consumers/test_parquet_writer.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.consumers.recorded_files import SUFFIX, Partition, RecordedFile, id_key, recorded_files
from anabranch.consumers.recorded_rows import Entry, Name, rows_of
from anabranch.transport.files import sync_directory

ASIDE = ".tmp"
Delivered = tuple[str, str, int]  # entry id, producer, seq


def write_entries(directory: Path, partition: Partition, entries: Sequence[Entry]) -> Path:
    """Write `entries` (of one partition, at least one) to one new file and return its path. Raises OSError."""
    ordered = sorted(entries, key=lambda entry: id_key(entry.entry_id))
    folder = directory / partition.folder
    folder.mkdir(parents=True, exist_ok=True)
    there = [file for file in recorded_files(directory) if file.partition == partition]
    first, last = ordered[0].entry_id, _free_end(ordered[0].entry_id, ordered[-1].entry_id, there)
    path = folder / f"{first}_{last}{SUFFIX}"
    write_table(pa.concat_tables([rows_of(entry) for entry in ordered], promote_options="default"), path)
    return path


def write_table(table: pa.Table, final: Path) -> None:
    """Write aside, fsync, rename. Raises OSError; nothing is left behind then."""
    take_name(write_aside(table, final), final)


def write_aside(table: pa.Table, final: Path) -> Path:
    """The first half of `write_table`: where the rows are now, durable. Raises OSError; nothing is left behind then."""
    aside = final.with_suffix(ASIDE)
    try:
        with aside.open("wb") as file:
            pq.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # most likely the disk is full: give back what the torn file holds
        aside.unlink(missing_ok=True)
        raise
    return aside


def take_name(aside: Path, final: Path) -> None:
    """The second half. Raises OSError; nothing is left behind then."""
    try:
        os.rename(aside, final)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_directory(final.parent)


def recorded(directory: Path, region: str, deliveries: Iterable[Delivered]) -> set[str]:
    """Entry ids of those deliveries that a file of `region` holds already. An id alone does not tell: a server that lost its last second gives it
    to another entry."""
    wanted = {(entry_id, producer, seq): entry_id for entry_id, producer, seq in deliveries}
    found: set[str] = set()
    if not wanted:
        return found
    low, high = min(map(id_key, wanted.values())), max(map(id_key, wanted.values()))
    for file in _of_region(directory, region):
        if file.last < low or file.first > high:
            continue
        names = ("entry_id", "producer", "seq")
        columns = [name for name in names if name in pq.read_schema(file.path).names]
        if len(columns) == len(names):
            table = pq.read_table(file.path, columns=columns, partitioning=None)
            keys = set(zip(*(table[name].to_pylist() for name in names), strict=True))
            found |= {wanted[key] for key in keys & wanted.keys()}
        else:  # of before there was a `seq`
            known = set(pq.read_table(file.path, columns=["entry_id"], partitioning=None)["entry_id"].to_pylist())
            found |= known & set(wanted.values())
    return found


def newest_names(directory: Path, region: str, at_least: int) -> list[Name]:
    """Of the groups in the newest files of `region`, oldest first: `at_least` so many, or all there are. Files of an earlier
    version, without `seq`, are passed over."""
    pages: list[list[Name]] = []
    found = 0
    for file in sorted(_of_region(directory, region), key=lambda f: f.last, reverse=True):
        if "seq" not in pq.read_schema(file.path).names:
            continue
        table = pq.read_table(file.path, columns=["producer", "seq"], partitioning=None)
        pages.append(list(dict.fromkeys(zip(table["producer"].to_pylist(), table["seq"].to_pylist(), strict=True))))
        found += len(pages[-1])
        if found >= at_least:
            break
    return [name for page in reversed(pages) for name in page]


def remove_leftovers(directory: Path) -> int:
    """Delete half-written files of a recorder that died; returns how many."""
    leftovers = list(directory.rglob(f"*{ASIDE}"))
    for path in leftovers:
        path.unlink()
    return len(leftovers)


def _of_region(directory: Path, region: str) -> list[RecordedFile]:
    return [file for file in recorded_files(directory) if file.partition.region == region]


def _free_end(first: str, last: str, there: Sequence[RecordedFile]) -> str:
    """The last id of a name that is free and that no merged file covers. In the order of a stream that is the last id itself; a server whose
    clock went back after it had lost its last second gives out ids of before."""

    def taken(file: RecordedFile) -> bool:
        low, high = id_key(first), id_key(last)
        return (file.first, file.last) == (low, high) or (file.merged and file.first <= low and high <= file.last)

    while ends := [file.last for file in there if taken(file)]:
        ms, seq = max(ends)
        last = f"{ms}-{seq + 1}"
    return last
