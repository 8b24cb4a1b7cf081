"""The table of trajectories: its address says all that it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.trajectory_filter import SORTS
from anabranch.consumers.viewer.table import FIELDS, columns, parse, read
from anabranch.schemas.errors import UsageError
from tests.replay_runs import write_run


@pytest.mark.parametrize(
    ("query", "count"),
    [({}, 14), ({"fate": "trained"}, 6), ({"fate": "age"}, 2), ({"fate": "pending"}, 2), ({"region": "west"}, 6), ({"step": "1"}, 4),
     ({"reward": "..0"}, 6), ({"text": "<script>"}, 2), ({"version": "e2.v1"}, 6), ({"group": "5"}, 4), ({"tokens": "4.."}, 0)],
)  # fmt: skip
def test_filters_are_those_of_replay_ls(tmp_path: Path, query: dict[str, str], count: int):
    write_run(tmp_path / "run")
    with RunReader(tmp_path / "run") as reader:
        rows, total = read(reader, parse(query))
    assert (len(rows), total) == (count, count)


def test_pages_and_sorting(tmp_path: Path):
    write_run(tmp_path / "run")
    with RunReader(tmp_path / "run") as reader:
        ids = []
        for number in (1, 2, 3):
            rows, total = read(reader, parse({"rows": "5", "page": str(number), "sort": "reward"}))
            ids += [row["id"] for row in rows]
    assert len(set(ids)) == total == 14


def test_addresses_lead_to_what_they_say():
    asked = parse({"fate": "age", "sort": "reward:desc", "page": "3", "rows": "20"})
    assert asked.address(number=4) == "/trajectories?fate=age&sort=reward%3Adesc&page=4&rows=20"
    assert asked.sorted_by("reward") == "/trajectories?fate=age&sort=reward&rows=20"
    assert asked.sorted_by("age") == "/trajectories?fate=age&sort=age%3Adesc&rows=20"
    assert parse({}).address() == "/trajectories"


@pytest.mark.parametrize(
    ("query", "why"),
    [({"page": "0"}, "page"), ({"page": "x"}, "page"), ({"rows": "10000"}, "rows"), ({"step": "a..b"}, "a step"), ({"fate": "bogus"}, "bogus"),
     ({"sort": "text; drop"}, "sort"), ({"text": "x" * 1000}, "at most 200"), ({"version": "zzz"}, "zzz")],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, query: dict[str, str], why: str):
    write_run(tmp_path / "run")
    with RunReader(tmp_path / "run") as reader, pytest.raises(UsageError, match=why):
        read(reader, parse(query))


def test_every_heading_sorts_by_something_there_is():
    assert {column for _, column in columns() if column} <= set(SORTS)
    assert set(FIELDS) == {"step", "version", "age", "reward", "tokens", "group", "region", "producer", "fate", "text"}
