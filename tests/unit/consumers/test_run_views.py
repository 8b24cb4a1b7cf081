"""Files of any age give the same view."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.run_views import ROLLOUTS, TRAJECTORY_COLUMNS
from tests.replay_runs import GROUPS, write_fates, write_partitioned, write_recorded, write_run, write_steps

WEST = [one for one in GROUPS if one.region == "west" and one.index in (3, 5)]
SHOWN = (
    "id, run, region, epoch, epoch_min, version_min, version_max, tokens, fate, step, train_epoch, train_version, age, "
    "fate_time_ms, advantage, weight, ratio_max, kept, learner_logprobs, entropy, factor, reward, text, appended_ms, answer"
)


def view(directory: Path) -> list[dict]:
    with RunReader(directory) as reader:
        return reader.rows(f"SELECT {SHOWN} FROM trajectories ORDER BY id")


def test_both_layouts_give_the_same_rows(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for place in (old, new):
        place.mkdir()
        write_fates(place, WEST)
        write_steps(place, WEST)
    write_recorded(old, WEST)
    write_partitioned(new, WEST, joined=False)
    assert view(old) == view(new)
    assert len(view(new)) == 4


def test_a_row_that_knows_its_fate_is_given_as_it_stands(tmp_path: Path) -> None:
    write_partitioned(tmp_path, WEST, joined=True)
    write_fates(tmp_path, WEST)
    write_steps(tmp_path, WEST)
    rows = view(tmp_path)
    assert {row["weight"] for row in rows} == {0.125}, "as the file has it, not as the step's record"
    assert {row["fate"] for row in rows} == {"trained"}


def test_a_row_without_a_fate_gets_it_and_its_step(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    rows = {row["id"]: row for row in view(tmp_path / "run")}
    trained = rows["east/east-0-ab/1/1"]
    assert (trained["fate"], trained["step"], trained["train_epoch"], trained["age"]) == ("trained", 1, 1, 0)
    assert (trained["advantage"], trained["weight"], trained["kept"]) == (0.5, 0.25, [True, True, False])
    assert trained["learner_logprobs"] == [-0.5, -1.0, -2.5]
    flat = rows["east/east-0-ab/2/0"]
    assert (flat["fate"], flat["step"], flat["weight"]) == ("dropped:zero_variance", 1, None)
    old = rows["east/east-0-ab/3/0"]
    assert (old["fate"], old["step"], old["age"]) == ("dropped:age", None, 9)
    assert rows["west/west-0-cd/2/0"]["fate"] is None
    swapped = rows["west/west-0-cd/1/0"]
    assert (swapped["epoch_min"], swapped["epoch"], swapped["version_min"], swapped["version_max"]) == (1, 2, 0, 1)


def test_without_records_of_steps_the_fates_are_there_all_the_same(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=False)
    rows = view(tmp_path / "run")
    assert [row["weight"] for row in rows] == [None] * 14
    assert sum(row["fate"] == "trained" for row in rows) == 6


@pytest.mark.parametrize(
    "view_name", ["trajectories", "fates", "steps", "evaluations", "notes", "versions", "rollouts", "facts"]
)
def test_an_empty_run_has_empty_views_with_all_columns(tmp_path: Path, view_name: str) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with RunReader(tmp_path) as reader:
        table = reader.query(f"SELECT * FROM {view_name}")
    assert table.num_rows == 0
    assert table.num_columns >= 3


def test_the_columns_are_those_that_are_told(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    with RunReader(tmp_path / "run") as reader:
        assert tuple(reader.query("SELECT * FROM trajectories LIMIT 0").column_names) == TRAJECTORY_COLUMNS
        assert set(reader.query("SELECT * FROM rollouts LIMIT 0").column_names) == set(ROLLOUTS)
