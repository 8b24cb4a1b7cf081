"""A file under its final name is complete, and what it holds can be asked for."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anabranch.consumers.parquet_writer import newest_names, recorded, remove_leftovers, write_entries
from anabranch.consumers.recorded_files import Partition, recorded_files
from anabranch.consumers.recorded_rows import Entry
from anabranch.schemas.trajectory import SCHEMA, decode_group, encode_group, read_batch
from tests.groups import group
from tests.limits import file_size_limit

EAST, WEST = (Partition("run", 1, "1970-01-01", region) for region in ("east", "west"))


def batch(index: int) -> pa.RecordBatch:
    return read_batch(encode_group(group(index)))


def entries(*ids: str, first_seq: int = 0) -> list[Entry]:
    return [Entry(entry_id, first_seq + number, batch(number)) for number, entry_id in enumerate(ids)]


def write(root: Path, partition: Partition, made: list[Entry]) -> list[Path]:
    return [write_entries(root, partition, made)]


def asked(*ids: str, seqs: dict[str, int]) -> list[tuple[str, str, int]]:
    return [(entry_id, "p", seqs.get(entry_id, 99)) for entry_id in ids]


def test_rows_are_those_of_the_entries_and_say_which(tmp_path: Path) -> None:
    (path,) = write(tmp_path, EAST, entries("5-0", "5-1"))
    assert path == tmp_path / "run=run/epoch=1/day=1970-01-01/region=east/5-0_5-1.parquet"
    table = pq.read_table(tmp_path)
    assert table.column("entry_id").to_pylist() == ["5-0", "5-0", "5-1", "5-1"]
    assert table.column("group_index").to_pylist() == [0, 0, 1, 1]
    assert set(SCHEMA.names) < set(table.column_names), "run and region by the folders, as any Parquet reader has them"
    assert table.column("region").to_pylist() == ["east"] * 4


def test_arrays_and_spans_survive(tmp_path: Path) -> None:
    sent = read_batch(encode_group(group(3, version=7)))
    (path,) = write(tmp_path, EAST, [Entry("1-0", 0, sent)])
    back = pq.read_table(path, partitioning=None)
    for name in set(SCHEMA.names) - {"run", "region"}:
        assert back.column(name).to_pylist() == sent.column(name).to_pylist()
        assert back.schema.field(name).type == SCHEMA.field(name).type


def test_a_batch_of_a_newer_minor_version_is_written_beside_ours(tmp_path: Path) -> None:
    newer = batch(1).append_column("route", pa.array(["a", "b"])).replace_schema_metadata(SCHEMA.metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, newer.schema) as writer:
        writer.write_batch(newer)
    payload = sink.getvalue().to_pybytes()
    assert decode_group(payload).group_index == 1
    write(tmp_path, EAST, [Entry("1-0", 0, batch(0)), Entry("1-1", 1, read_batch(payload))])
    assert recorded(tmp_path, "east", [("1-0", "p", 0), ("1-1", "p", 1)]) == {"1-0", "1-1"}


def test_recorded_tells_what_is_on_disk_and_what_is_not(tmp_path: Path) -> None:
    seqs = {"5-0": 0, "5-1": 1, "7-3": 2, "9-0": 0, "10-0": 1, "6-0": 0}
    write(tmp_path, EAST, entries("5-0", "5-1", "7-3"))
    write(tmp_path, EAST, entries("9-0", "10-0"))
    write(tmp_path, WEST, entries("6-0"))
    ids = asked("4-0", "5-1", "6-0", "7-3", "9-1", "10-0", "11-0", seqs=seqs)
    assert recorded(tmp_path, "east", ids) == {"5-1", "7-3", "10-0"}
    assert recorded(tmp_path, "west", ids) == {"6-0"}
    assert recorded(tmp_path, "east", []) == set()
    assert recorded(tmp_path, "nowhere", ids) == set()


def test_an_id_that_a_server_gave_again_to_another_entry_is_not_on_disk(tmp_path: Path) -> None:
    write(tmp_path, EAST, entries("5-0"))
    assert recorded(tmp_path, "east", [("5-0", "p", 7), ("5-0", "q", 0)]) == set()


def test_files_of_before_there_were_partitions_and_numbers_are_looked_into(tmp_path: Path) -> None:
    folder = tmp_path / "region=east"
    folder.mkdir()
    old = pa.Table.from_batches([batch(0).drop_columns(["region"])]).replace_schema_metadata(None)
    old = old.append_column("entry_id", pa.array(["3-0"] * old.num_rows))
    pq.write_table(old, folder / "3-0_3-0.parquet")
    assert recorded(tmp_path, "east", [("3-0", "p", 0)]) == {"3-0"}
    assert newest_names(tmp_path, "east", 10) == []
    write(tmp_path, EAST, entries("9-0", first_seq=4))
    assert newest_names(tmp_path, "east", 10) == [("p", 4)]


def test_leftovers_go_and_files_stay(tmp_path: Path) -> None:
    (kept,) = write(tmp_path, EAST, entries("5-0"))
    torn = kept.with_name("6-0_9-0.tmp")
    torn.write_bytes(b"PAR1 half")
    assert remove_leftovers(tmp_path) == 1
    assert not torn.exists()
    assert recorded(tmp_path, "east", [("5-0", "p", 0)]) == {"5-0"}
    assert remove_leftovers(tmp_path / "not there") == 0


def test_a_write_that_fails_says_so_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """On a full disk a half-written file would keep the very space that is needed."""
    made = entries(*(f"1-{i}" for i in range(50)))
    with file_size_limit(1000), pytest.raises(OSError, match="too large"):
        write(tmp_path, EAST, made)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
    write(tmp_path, EAST, made)
    assert recorded(tmp_path, "east", [("1-49", "p", 49)]) == {"1-49"}


def test_the_newest_groups_are_known_by_producer_and_seq(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path, EAST, entries(f"{7 + number}-0", f"{7 + number}-1", first_seq=2 * number))
    assert newest_names(tmp_path, "east", 3) == [("p", seq) for seq in range(2, 6)]
    assert newest_names(tmp_path, "east", 100) == [("p", seq) for seq in range(6)]
    assert newest_names(tmp_path, "north", 100) == []


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(
    "later",
    [["12-0", "15-0"], ["5-0", "30-0"], ["10-0", "20-0"], ["20-0", "30-0"], ["10-0"], ["20-0"], ["5-0", "10-0"]],
)
def test_nothing_hides_what_a_server_gives_ids_of_before(tmp_path: Path, later: list[str], merged: bool) -> None:
    (path,) = write(tmp_path, EAST, entries("10-0", "20-0"))
    if merged:
        path.rename(path.with_name("10-0_20-0.merged.parquet"))
    for seq in (10, 20, 30):
        write(tmp_path, EAST, entries(*later, first_seq=seq))
    seqs = [
        pq.read_table(f.path, columns=["seq"], partitioning=None)["seq"].to_pylist() for f in recorded_files(tmp_path)
    ]
    expected = [0, 1, *(first + n for first in (10, 20, 30) for n in range(len(later)))]
    assert sorted(seq for part in seqs for seq in part) == sorted(expected * 2), "each group has two rollouts"
    asked = [(later[-1], "p", first + len(later) - 1) for first in (10, 20, 30)]
    assert recorded(tmp_path, "east", asked) == {later[-1]}
