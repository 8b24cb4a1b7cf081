"""Filters as people write them, and what they find."""

from __future__ import annotations

import pytest

from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.trajectory_filter import SORTS, Range, TrajectoryFilter, Versions, check_fate, order_by
from anabranch.schemas.errors import UsageError
from tests.replay_runs import write_run


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory):
    with RunReader(write_run(tmp_path_factory.mktemp("filters") / "run")) as reader:
        yield reader


def found(reader: RunReader, wanted: TrajectoryFilter) -> list[str]:
    where, values = wanted.where()
    return [row["id"] for row in reader.rows(f"SELECT id FROM trajectories WHERE {where} ORDER BY id", values)]


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("5", 5, 5), ("5..9", 5, 9), ("..9", None, 9), ("5..", 5, None), ("0.5", 0.5, 0.5), ("-1..0", -1, 0)],
)
def test_ranges(text: str, low: float | None, high: float | None) -> None:
    assert Range.parse(text) == Range(low, high)


@pytest.mark.parametrize("text", ["", "..", "a", "9..5", "nan", "1..2..3", "inf"])
def test_no_ranges(text: str) -> None:
    with pytest.raises(UsageError):
        Range.parse(text)


@pytest.mark.parametrize("text", ["", "e1", "e1.v1..e2.v3", "v", "x..3", "e1.v5..4"])
def test_no_versions(text: str) -> None:
    with pytest.raises(UsageError):
        Versions.parse(text)


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        (TrajectoryFilter(), 14),
        (TrajectoryFilter(step=Range(1, 1)), 4),
        (TrajectoryFilter(step=Range(1, None)), 8),
        (TrajectoryFilter(age=Range(9, 9)), 2),
        (TrajectoryFilter(reward=Range(0.25, 0.25)), 1),
        (TrajectoryFilter(region="west"), 6),
        (TrajectoryFilter(region="west", fate="trained"), 4),
        (TrajectoryFilter(producer="east-0-ab"), 8),
        (TrajectoryFilter(fate="dropped"), 6),
        (TrajectoryFilter(fate="dropped:age"), 2),
        (TrajectoryFilter(fate="pending"), 2),
        (TrajectoryFilter(text="SCRIPT"), 2),
        (TrajectoryFilter(text="4 + 1 ="), 2),
        (TrajectoryFilter(text="'; DROP"), 2),
        (TrajectoryFilter(text="%"), 2),
        (TrajectoryFilter(group=Range(5, 5)), 4),
        (TrajectoryFilter(tokens=Range(4, None)), 0),
        (TrajectoryFilter(version=Versions.parse("e1.v0")), 10),
        (TrajectoryFilter(version=Versions.parse("e2.v1")), 6),
        (TrajectoryFilter(version=Versions.parse("1")), 6),
        (TrajectoryFilter(version=Versions.parse("0..1")), 14),
        (TrajectoryFilter(version=Versions.parse("e2.v0")), 0),
        (TrajectoryFilter(version=Versions.parse("2..")), 0),
    ],
)
def test_what_filters_find(reader: RunReader, wanted: TrajectoryFilter, count: int) -> None:
    assert len(found(reader, wanted)) == count


@pytest.mark.parametrize("name", SORTS)
def test_every_sort_is_a_total_order(reader: RunReader, name: str) -> None:
    for sort in (name, f"{name}:desc"):
        rows = reader.rows(f"SELECT id, {name} AS value FROM trajectories ORDER BY {order_by(sort)}")
        again = reader.rows(f"SELECT id FROM trajectories ORDER BY {order_by(sort)}")
        assert [row["id"] for row in rows] == [row["id"] for row in again]
        values = [row["value"] for row in rows if row["value"] is not None]
        assert values == sorted(values, reverse=sort != name)


def test_what_is_nothing_to_sort_by_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'reward'"):
        order_by("-rewrad; DROP TABLE x")


def test_fates_by_their_cause() -> None:
    assert check_fate("age") == "dropped:age"
    assert check_fate("trained") == "trained"
    with pytest.raises(UsageError, match="did you mean"):
        check_fate("dropped:agee")
