"""A file under its final name is complete, and what it holds can be asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anabranch.consumers.parquet_writer import Entry, newest_names, recorded, remove_leftovers, write_entries
from anabranch.schemas.trajectory import SCHEMA, decode_group, encode_group, read_batch
from tests.groups import group
from tests.limits import file_size_limit


def batch(index: int) -> pa.RecordBatch:
    return read_batch(encode_group(group(index)))


def entries(*ids: str, first_seq: int = 0) -> list[Entry]:
    return [Entry(entry_id, first_seq + number, batch(number)) for number, entry_id in enumerate(ids)]


def test_rows_are_those_of_the_entries_and_say_which(tmp_path: Path) -> None:
    path = write_entries(tmp_path, "east", entries("5-0", "5-1"))
    assert path == tmp_path / "region=east" / "5-0_5-1.parquet"
    table = pq.read_table(tmp_path)
    assert table.column("entry_id").to_pylist() == ["5-0", "5-0", "5-1", "5-1"]
    assert table.column("group_index").to_pylist() == [0, 0, 1, 1]
    assert set(table.column_names) == (set(SCHEMA.names) | {"entry_id", "seq"})
    assert table.column("region").to_pylist() == ["east"] * 4, "from the folder's name, as any Parquet reader has it"


def test_arrays_and_spans_survive(tmp_path: Path) -> None:
    sent = read_batch(encode_group(group(3, version=7)))
    path = write_entries(tmp_path, "east", [Entry("1-0", 0, sent)])
    back = pq.read_table(path, partitioning=None).drop_columns(["entry_id", "seq"])
    for name in back.column_names:
        assert back.column(name).to_pylist() == sent.column(name).to_pylist()
        assert back.schema.field(name).type == SCHEMA.field(name).type


def test_a_batch_of_a_newer_minor_version_is_written_beside_ours(tmp_path: Path) -> None:
    newer = batch(1).append_column("route", pa.array(["a", "b"])).replace_schema_metadata(SCHEMA.metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, newer.schema) as writer:
        writer.write_batch(newer)
    payload = sink.getvalue().to_pybytes()
    assert decode_group(payload).group_index == 1
    write_entries(tmp_path, "east", [Entry("1-0", 0, batch(0)), Entry("1-1", 1, read_batch(payload))])
    assert recorded(tmp_path, "east", ["1-0", "1-1"]) == {"1-0", "1-1"}


def test_recorded_tells_what_is_on_disk_and_what_is_not(tmp_path: Path) -> None:
    write_entries(tmp_path, "east", entries("5-0", "5-1", "7-3"))
    write_entries(tmp_path, "east", entries("9-0", "10-0"))
    write_entries(tmp_path, "west", entries("6-0"))
    asked = ["4-0", "5-1", "6-0", "7-3", "9-1", "10-0", "11-0"]
    assert recorded(tmp_path, "east", asked) == {"5-1", "7-3", "10-0"}
    assert recorded(tmp_path, "west", asked) == {"6-0"}
    assert recorded(tmp_path, "east", []) == set()
    assert recorded(tmp_path, "nowhere", asked) == set()


def test_leftovers_go_and_files_stay(tmp_path: Path) -> None:
    kept = write_entries(tmp_path, "east", entries("5-0"))
    torn = kept.with_name("6-0_9-0.tmp")
    torn.write_bytes(b"PAR1 half")
    assert remove_leftovers(tmp_path) == 1
    assert not torn.exists()
    assert recorded(tmp_path, "east", ["5-0"]) == {"5-0"}
    assert remove_leftovers(tmp_path / "not there") == 0


def test_a_write_that_fails_says_so_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """On a full disk a half-written file would keep the very space that is needed."""
    made = entries(*(f"1-{i}" for i in range(50)))
    with file_size_limit(1000), pytest.raises(OSError, match="too large"):
        write_entries(tmp_path, "east", made)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
    write_entries(tmp_path, "east", made)
    assert recorded(tmp_path, "east", ["1-49"]) == {"1-49"}


def test_the_newest_groups_are_known_by_producer_and_seq(tmp_path: Path) -> None:
    for number in range(3):
        path = write_entries(tmp_path, "east", entries(f"{9 - number}-0", f"{9 - number}-1", first_seq=2 * number))
        os.utime(path, ns=(number, number))
    (tmp_path / "region=east" / "1-0_1-0.parquet").write_bytes(old_file(tmp_path))
    assert newest_names(tmp_path, "east", 3) == [("p", seq) for seq in range(2, 6)]
    assert newest_names(tmp_path, "east", 100) == [("p", seq) for seq in range(6)]
    assert newest_names(tmp_path, "north", 100) == []


def old_file(folder: Path) -> bytes:
    """As before there was a `seq`."""
    path = write_entries(folder, "west", entries("1-0"))
    pq.write_table(pq.read_table(path, partitioning=None).drop_columns("seq"), path)
    return path.read_bytes()
