"""Another reward over recorded text."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.trajectory_filter import TrajectoryFilter
from anabranch.deploy.replay_rescore import as_json, load_function, render, rescore, task_scorer
from anabranch.producers.environments.reasoning_gym import Task
from anabranch.schemas.config import TaskSection
from anabranch.schemas.errors import UsageError
from tests.replay_runs import GROUPS, write_run

ALL = TrajectoryFilter()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory):
    with RunReader(write_run(tmp_path_factory.mktemp("rescore") / "run")) as reader:
        yield reader


def test_how_many_change_and_what_that_does_to_groups(reader: RunReader) -> None:
    found = rescore(reader, ALL, lambda row: 1.0)
    assert (found.trajectories, found.changed, found.groups) == (14, 7, 7)
    assert (found.flat_before, found.flat_after) == (1, 7)
    assert found.moves[0.0, 1.0] == 6
    assert found.moves[0.25, 1.0] == 1
    assert len(found.examples) == 7
    assert as_json(found)["moves"][0] == {"before": 1.0, "after": 1.0, "trajectories": 7}


def test_the_same_reward_changes_nothing(reader: RunReader) -> None:
    found = rescore(reader, ALL, lambda row: row["reward"])
    assert (found.changed, found.flat_before, found.flat_after) == (0, 1, 1)


def test_what_cannot_be_scored_is_counted_by_its_reason(reader: RunReader) -> None:
    def scorer(row):
        if row["sample_index"]:
            raise ValueError("no\x1b[31m")
        return float("nan") if row["region"] == "west" else 1.0

    found = rescore(reader, ALL, scorer)
    assert found.trajectories == 4
    assert sum(found.unscored.values()) == 10
    assert found.unscored["ValueError: no\x1b[31m"] == 7
    assert found.groups == 0, "no group was scored as a whole"
    assert render(found, 100).replace("\n", "").isprintable()


def test_a_function_of_a_file_or_a_module(reader: RunReader, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def reward(prompt, text, answer):\n    return float(prompt[0] == '3') + len(answer)\n")
    found = rescore(reader, TrajectoryFilter(region="west"), load_function(f"{path}:reward"))
    assert set(found.moves) == {(0.0, 3.0), (1.0, 3.0), (0.0, 2.0), (1.0, 2.0), (0.25, 2.0)}
    assert load_function("operator:concat")


@pytest.mark.parametrize("name", ["reward", "nowhere_at_all:reward", "math:sqroot", ":f", "math:"])
def test_a_function_that_is_none(name: str) -> None:
    with pytest.raises(UsageError, match="--with"):
        load_function(name)


def test_an_environment_scores_its_own_prompts_and_refuses_others() -> None:
    section = TaskSection(dataset="chain_sum", params={"min_terms": 2, "max_terms": 2}, heldout_size=2)
    problem = Task(section, 3).prompt(GROUPS[0].index)
    score = task_scorer(section, 3)
    row = {"group_index": GROUPS[0].index, "prompt_text": problem.prompt_text, "text": problem.answer}
    assert score(row) == 1.0
    assert score(row | {"text": "nonsense"}) == 0.0
    with pytest.raises(ValueError, match="another prompt"):
        score(row | {"prompt_text": "3 + 1 ="})
