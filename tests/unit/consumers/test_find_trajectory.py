"""What a person types, and what is meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.consumers.find_trajectory import find_group, find_trajectory
from anabranch.consumers.run_reader import RunReader
from anabranch.schemas.errors import UsageError
from tests.replay_runs import GROUPS, changed, write_run


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory):
    groups = [*GROUPS, changed(GROUPS[0], seq=11, index=11), changed(GROUPS[0], seq=12, index=12, rewards=(1.0,) * 12)]
    with RunReader(write_run(tmp_path_factory.mktemp("find") / "run", groups)) as reader:
        yield reader


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("east/east-0-ab/1/0", "east/east-0-ab/1/0"),
        ("e/east/1/0", "east/east-0-ab/1/0"),
        ("west/1/1", "west/west-0-cd/1/1"),
        ("4/0", "east/east-0-ab/4/0"),
        ("11/1", "east/east-0-ab/11/1"),
        ("east/east-0-ab/12/1", "east/east-0-ab/12/1"),
    ],
)
def test_one_is_meant(reader: RunReader, text: str, meant: str) -> None:
    assert str(find_trajectory(reader, text)) == meant


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1/0", "not unique: east/east-0-ab/1/0, west/west-0-cd/1/0"),
        ("13/0", "nearest: east/east-0-ab/12/0"),
        ("12/99", "nearest: east/east-0-ab/12"),
        ("mars/p/1/0", "nearest: east/east-0-ab"),
        ("12", "no id"),
        ("", "no id"),
        ("a/b/c/d/e", "no id"),
        ("east/east-0-ab/1/x'; --", "no id"),
    ],
)
def test_none_or_several(reader: RunReader, text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        find_trajectory(reader, text)


def test_a_group_by_itself_or_by_one_of_its_own(reader: RunReader) -> None:
    for text in ("east/east-0-ab/4", "4", "east/4", "east/east-0-ab/4/1"):
        assert str(find_group(reader, text)) == "east/east-0-ab/4"
    with pytest.raises(UsageError, match="not unique"):
        find_group(reader, "1")


def test_an_empty_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with RunReader(tmp_path) as reader, pytest.raises(UsageError, match="no trajectory is recorded"):
        find_trajectory(reader, "1/0")
