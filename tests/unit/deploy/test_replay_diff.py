"""Where two trajectories part."""

from __future__ import annotations

import pytest

from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.trajectory_page import read_group
from anabranch.deploy.replay_diff import compare, render
from anabranch.schemas.trajectory_id import parse_id
from tests.replay_runs import write_run


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    ids = ("east/east-0-ab/1/0", "east/east-0-ab/1/1", "west/west-0-cd/1/0")
    with RunReader(write_run(tmp_path_factory.mktemp("diff") / "run")) as reader:
        return {text: read_group(reader, parse_id(text))[0] for text in ids}


def test_the_common_part_is_equal_and_the_next_token_differs(rows: dict[str, dict]) -> None:
    a, b = rows["east/east-0-ab/1/0"], rows["east/east-0-ab/1/1"]
    found = compare(a, b)
    assert (found["same_prompt"], found["common_tokens"], found["largest_logprob_difference"]) == (True, 1, 0.0)
    assert found["other_version_from"] is None
    shown = render(a, b, width=100)
    assert "completions: 1 tokens in common, then they part" in shown
    assert [line.split()[0] for line in shown.splitlines() if line.endswith("≠")] == ["1"]


def test_the_same_tokens_by_other_versions(rows: dict[str, dict]) -> None:
    a, b = rows["east/east-0-ab/1/0"], rows["west/west-0-cd/1/0"]
    assert compare(a, b)["other_version_from"] == 2
    assert "completions: the same 3 tokens" in render(a, b, width=100)


def test_one_that_ends_first(rows: dict[str, dict]) -> None:
    a = rows["east/east-0-ab/1/0"]
    short = a | {"tokens": 2, "token_ids": a["token_ids"][:2], "logprobs": a["logprobs"][:2]}
    assert compare(a, short)["common_tokens"] == 2
    assert "\n2 " in render(a, short, width=100)


def test_hostile_text_is_shown_harmlessly(rows: dict[str, dict]) -> None:
    a, b = rows["east/east-0-ab/1/1"], rows["west/west-0-cd/1/0"]
    assert render(a, b, width=80).replace("\n", "").isprintable()
