"""Groups as a recorder leaves them in a run directory: for tests that read them back."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from anabranch.consumers.parquet_writer import write_entries
from anabranch.consumers.recorded_rows import Entry, partition_of
from anabranch.schemas.trajectory import Group, encode_group, read_batch


def record_groups(directory: Path, groups: Iterable[Group], *, region: str = "east") -> Path:
    """Each group, of one run and epoch, is the entry of its index, of the producer that it names. Returns the file."""
    entries = [Entry(f"{1000 + g.group_index}-0", g.group_index, read_batch(encode_group(g))) for g in groups]
    partition = partition_of(entries[0], run=entries[0].rows.column("run")[0].as_py(), region=region)
    return write_entries(directory / "trajectories", partition, entries)
