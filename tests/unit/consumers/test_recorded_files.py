"""Which recorded files count: by their names alone."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.consumers.recorded_files import Partition, files_that_count, id_key, parse_name, recorded_files

PART = "run=demo/epoch=1/day=2026-12-01/region=east"


def counted(*names: str) -> list[str]:
    return [str(file.path) for file in files_that_count(names)]


def test_ids_sort_by_number_not_by_text() -> None:
    assert sorted(["10-0", "9-12", "9-2", "9"], key=id_key) == ["9", "9-2", "9-12", "10-0"]


def test_both_layouts_are_listed_oldest_first(tmp_path: Path) -> None:
    made = (f"{PART}/10-0_10-5.parquet", f"{PART}/9-0_9-1.parquet", "region=east/1-0_2-0.parquet")
    others = (
        f"{PART}/11-0_12-0.tmp",
        f"{PART}/.12-0_12-0.parquet.7.tmp",
        f"{PART}/notes.parquet",
        "lock",
        "region=east/x/1-0_1-0.parquet",
    )
    for name in (*made, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = recorded_files(tmp_path)
    assert [file.path for file in found] == [tmp_path / name for name in reversed(made)]
    assert found[0].partition == Partition(None, None, None, "east")
    assert found[1].partition == Partition("demo", 1, "2026-12-01", "east")
    assert (found[2].first_id, found[2].last_id) == ("10-0", "10-5")
    assert recorded_files(tmp_path / "nowhere") == []


def test_a_file_inside_a_merged_ones_range_does_not_count() -> None:
    merged = f"{PART}/10-0_20-3.merged.parquet"
    parts = [f"{PART}/10-0_10-5.parquet", f"{PART}/11-0_12-0.parquet", f"{PART}/20-3_20-3.parquet"]
    assert counted(*parts, merged) == [merged]
    assert counted(*parts) == parts
    later = f"{PART}/20-4_21-0.parquet"
    assert counted(later, merged, *parts) == [merged, later]


def test_a_file_that_reaches_beyond_another_counts_and_so_does_one_of_another_partition() -> None:
    beyond = [f"{PART}/10-0_20-0.parquet", f"{PART}/15-0_25-0.parquet"]
    assert counted(*beyond) == beyond
    elsewhere = [
        f"{PART}/10-0_20-0.parquet", f"{PART.replace('east', 'west')}/11-0_12-0.parquet",
        f"{PART.replace('epoch=1', 'epoch=2')}/12-0_12-0.parquet", "region=east/13-0_13-0.parquet",
    ]  # fmt: skip
    assert counted(*elsewhere) == elsewhere


@pytest.mark.parametrize(
    "name",
    ["region=east/1-0.parquet", "1-0_2-0.parquet", "epoch=1/region=east/1-0_1-0.parquet", f"{PART}/x/1-0_1-0.parquet",
     "run=a/epoch=one/day=2026-12-01/region=east/1-0_1-0.parquet", "region=east/1-0_1-0.parquet.tmp", "region=east/a_b.parquet"],
)  # fmt: skip
def test_other_paths_are_no_recorded_files(name: str) -> None:
    assert parse_name(name) is None


@given(st.text(min_size=1).filter(lambda text: "\0" not in text), st.text(min_size=1), st.integers(0, 10**9 - 1))
def test_names_of_partitions_come_back(run: str, region: str, epoch: int) -> None:
    partition = Partition(run, epoch, "2026-12-01", region)
    parsed = parse_name(f"{partition.folder}/1-0_2-0.parquet")
    assert parsed is not None
    assert parsed.partition == partition


@pytest.mark.parametrize("region", ["east", "eu west/1", "50%", "größe", "a=b"])
def test_arrow_reads_the_same_values_from_the_folders(tmp_path: Path, region: str) -> None:
    path = tmp_path / Partition("demo", 3, "2026-12-01", region).folder / "1-0_2-0.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"x": [1]}), path)
    row = ds.dataset(tmp_path, partitioning="hive").to_table().to_pylist()[0]
    assert (row["run"], row["epoch"], row["region"]) == ("demo", 3, region)


IDS = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted)


@given(st.lists(st.tuples(IDS, st.booleans()), max_size=12, unique_by=str))
def test_a_file_counts_if_and_only_if_no_merged_one_covers_it(ranges: list[tuple[list[int], bool]]) -> None:
    files = [(a, b, merged) for (a, b), merged in ranges]
    expected = {
        (a, b, m) for a, b, m in files
        if not any(merged and c <= a and b <= d and (c, d, merged) != (a, b, m) for c, d, merged in files)
    }  # fmt: skip
    found = files_that_count(f"{PART}/{a}-0_{b}-0{'.merged' if m else ''}.parquet" for a, b, m in files)
    assert {(file.first[0], file.last[0], file.merged) for file in found} == expected
