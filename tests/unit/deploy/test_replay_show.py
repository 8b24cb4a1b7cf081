"""One trajectory, and a group side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.token_values import token_pieces
from anabranch.consumers.trajectory_page import read_group
from anabranch.deploy import replay_show
from anabranch.deploy.replay_text import width_of
from anabranch.schemas.trajectory_id import parse_id
from tests.replay_runs import write_run


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory):
    with RunReader(write_run(tmp_path_factory.mktemp("show") / "run")) as reader:
        yield reader


def row(reader: RunReader, text: str) -> dict:
    (found,) = read_group(reader, parse_id(text))
    return found


def test_values_stand_beside_their_token(reader: RunReader) -> None:
    lines = replay_show.token_lines(row(reader, "west/west-0-cd/1/1"), pieces=None, most=None)
    assert [line.split() for line in lines] == [
        ["#", "token", "version", "log-prob", "learner's", "ratio", "entropy", "factor", "kept"],
        ["0", "7", "e1.v0", "-0.5", "-0.5", "1", "1", "1", "yes"],
        ["1", "9", "e1.v0", "-1.25", "-1", "1.284", "2", "0.75", "yes"],
        ["2", "9", "e2.v1", "-2", "-2.5", "0.6065", "0.5", "0", "no"],
    ]


def test_what_was_not_recorded_has_no_column(reader: RunReader) -> None:
    lines = replay_show.token_lines(row(reader, "west/west-0-cd/2/0"), pieces=lambda token: f"<{token}\n>", most=2)
    assert lines[0].split() == ["#", "token", "piece", "version", "log-prob"]
    assert "'<7\\\\n>'" in lines[1]
    assert lines[-1] == "... 1 more; --all-tokens shows them"


@pytest.mark.parametrize("text", ["west/west-0-cd/1/0", "west/west-0-cd/2/1", "east/east-0-ab/2/0"])
def test_nothing_hostile_reaches_a_terminal(reader: RunReader, text: str) -> None:
    shown = replay_show.render(row(reader, text), width=100)
    assert shown.replace("\n", "").isprintable()
    assert "\\x1b[31m<script>" in shown or text != "west/west-0-cd/1/0"


@pytest.mark.parametrize("width", [60, 100, 200])
def test_a_group_side_by_side_fits(reader: RunReader, width: int) -> None:
    rows = read_group(reader, parse_id("west/west-0-cd/1"))
    shown = replay_show.render_group(rows, width=width)
    assert shown.replace("\n", "").isprintable()
    body = shown.splitlines()[3:]
    assert all(width_of(line) <= width for line in body)
    assert any("/0  reward 0" in line and "/1  reward 1" in line for line in body), "beside each other"


def test_pieces_come_from_the_runs_tokenizer_or_not_at_all(tmp_path: Path) -> None:
    assert token_pieces(None) is None
    assert token_pieces(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{broken")
    assert token_pieces(tmp_path) is None
