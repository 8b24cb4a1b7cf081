"""Lines of growing files, once each."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from anabranch.consumers.json_tail import JsonTail

SCHEMA = pa.schema([("n", pa.int64()), ("x", pa.float64()), ("s", pa.string()), ("b", pa.bool_())])


def read(tail: JsonTail, *paths: Path) -> tuple[bool, list[dict]]:
    again, tables = tail.read(paths)
    return again, [row for table in tables for row in table.to_pylist()]


def test_each_whole_line_once_in_order(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text('{"n": 1}\n{"n": 2}\n{"n": 3')
    b.write_text('{"n": 9, "other": [1]}\n')
    tail = JsonTail(SCHEMA)
    assert [row["n"] for row in read(tail, a, b)[1]] == [1, 2, 9]
    assert read(tail, a, b) == (False, [])
    with a.open("a") as file:
        file.write('}\n{"n": 4}\n')
    assert [row["n"] for row in read(tail, a, b)[1]] == [3, 4]


def test_a_damaged_line_costs_that_line(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(
        b'{"n": 1}\n\xff\x00garbage\n[1]\n{"n": "two", "s": {"k": [1]}, "x": "NaN", "b": 1}\n{"n": 3, "b": true}\n\n'
    )
    rows = read(JsonTail(SCHEMA), path)[1]
    assert [row["n"] for row in rows] == [1, None, 3]
    assert rows[1]["x"] != rows[1]["x"]
    assert json.loads(rows[1]["s"]) == {"k": [1]}
    assert [row["b"] for row in rows] == [None, None, True]


@pytest.mark.parametrize("replace", [True, False])
def test_a_file_that_was_replaced_or_cut_begins_anew(tmp_path: Path, replace: bool) -> None:
    path = tmp_path / "a"
    path.write_text('{"n": 1}\n{"n": 2}\n')
    tail = JsonTail(SCHEMA)
    read(tail, path)
    if replace:
        other = tmp_path / "other"
        other.write_text('{"n": 5}\n{"n": 6}\n{"n": 7}\n')
        other.rename(path)
    else:
        path.write_text('{"n": 5}\n')
    again, rows = read(tail, path)
    assert again
    assert rows[0]["n"] == 5


def test_rows_that_were_not_taken_come_again(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text('{"n": 1}\n')
    tail = JsonTail(SCHEMA)
    _, tables = tail.read([path])
    next(tables)  # and whoever asked failed
    assert [row["n"] for row in read(tail, path)[1]] == [1]
