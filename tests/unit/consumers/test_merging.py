"""Which files are merged, and what a merged one hides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from anabranch.consumers.merging import Weighed, merge, merged_path, still_alone, to_merge
from anabranch.consumers.recorded_files import Partition, RecordedFile
from tests.keeping import write_groups

EAST = Partition("run", 1, "2026-01-01", "east")


def file(first: int, last: int, partition: Partition = EAST) -> RecordedFile:
    return RecordedFile(Path(f"{partition.region}-{first}_{last}.parquet"), partition, f"{first}-0", f"{last}-0")


def weighed(
    *ranges: tuple[int, int], bytes_: int = 10, settled: bool = True, partition: Partition = EAST
) -> list[Weighed]:
    return [Weighed(file(a, b, partition), bytes_, settled) for a, b in ranges]


def chosen(files: list[Weighed], *, target: int = 100, at_least: int = 3) -> list[tuple[int, int]]:
    return [(f.first[0], f.last[0]) for f in to_merge(files, target_bytes=target, at_least=at_least)]


def test_neighbours_are_merged_up_to_the_target():
    files = weighed(*((i, i) for i in range(20)))
    assert chosen(files) == [(i, i) for i in range(10)]
    assert chosen(files, at_least=11) == []


def test_too_few_are_left_alone():
    assert chosen(weighed((1, 1), (2, 2))) == []


def test_a_file_that_is_not_settled_parts_its_neighbours():
    files = weighed((1, 1), (2, 2)) + weighed((3, 3), settled=False) + weighed((4, 4), (5, 5), (6, 6))
    assert chosen(files) == [(4, 4), (5, 5), (6, 6)]


def test_large_files_stay_and_part_their_neighbours():
    files = weighed((1, 1), (2, 2)) + weighed((3, 3), bytes_=60) + weighed((4, 4), (5, 5), (6, 6))
    assert chosen(files) == [(4, 4), (5, 5), (6, 6)]


def test_partitions_are_never_mixed_and_old_layouts_never_touched():
    west = replace(EAST, region="west")
    assert chosen(weighed((1, 1), (2, 2)) + weighed((3, 3), (4, 4), partition=west)) == []
    old = Partition(None, None, None, "east")
    assert chosen(weighed((1, 1), (2, 2), (3, 3), partition=old)) == []


def test_files_whose_ids_overlap_are_not_merged_into_one():
    assert chosen(weighed((1, 5), (3, 7), (8, 8))) == []


def test_a_large_one_is_not_written_again_for_a_few_small_ones():
    small = weighed(*((i, i) for i in range(2, 5)), bytes_=5)
    assert chosen([*weighed((1, 1), bytes_=30), *small]) == [(2, 2), (3, 3), (4, 4)], "without it"
    assert chosen([*small[:1], *weighed((3, 3), bytes_=30), *small[2:]]) == []
    assert chosen([*weighed((1, 1), bytes_=15), *small]) == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_a_row_is_written_again_a_few_times_only():
    files: list[Weighed] = []
    written = 0
    for index in range(512):
        files.append(weighed((index, index), bytes_=1)[0])
        while parts := to_merge(files, target_bytes=1024):
            size = sum(one.bytes for one in files if one.file in parts)
            one = replace(file(parts[0].first[0], parts[-1].last[0]), merged=True)
            files = [other for other in files if other.file not in parts] + [Weighed(one, size, True)]
            written += size
    assert written <= 512 * 9, "log2 of 512 times; every eight new files into one would be 37 times"
    assert len(files) <= 8 * 9


def test_one_that_a_merged_file_would_hide_keeps_others_from_nothing():
    files = weighed((1, 1), (2, 2), (4, 9)) + weighed((5, 6), settled=False) + weighed((20, 20), (21, 21), (22, 22))
    assert chosen(files) == [(20, 20), (21, 21), (22, 22)]


def test_one_that_came_between_is_seen():
    parts = [file(1, 2), file(5, 6)]
    assert still_alone(parts, [*parts, file(7, 8), file(1, 9, replace(EAST, region="west"))])
    assert not still_alone(parts, [*parts, file(3, 4)])
    assert not still_alone(parts, parts[:1]), "or that went"


def test_rows_of_all_parts_in_the_order_of_their_ids(tmp_path: Path):
    parts = [write_groups(tmp_path, 1, 2), write_groups(tmp_path, 3), write_groups(tmp_path, 4)]
    assert merge(parts)["seq"].to_pylist() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert merged_path(parts).name == "1001-0_1004-0.merged.parquet"
