"""Fates are found whenever somebody asks, though each line is read once."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.consumers import fate_follower
from anabranch.consumers.fate_follower import FateFollower
from tests.keeping import fate_of, log_fates


def name(index: int) -> tuple[str, str, int]:
    return ("east", "p", index)


def test_those_that_are_there_are_found_and_others_when_they_come(tmp_path: Path):
    log_fates(tmp_path, fate_of(1), fate_of(2, "dropped:age"))
    follower = FateFollower(tmp_path)
    assert {k: v["fate"] for k, v in follower.find([name(1), name(7)]).items()} == {name(1): "trained"}
    log_fates(tmp_path, fate_of(7))
    found = follower.find([name(1), name(2), name(7)])
    assert {k[2] for k in found} == {1, 2, 7}, "2 was there before anybody asked for it"
    assert follower.find([]) == {}


def test_no_log_no_fates(tmp_path: Path):
    assert FateFollower(tmp_path).find([name(1)]) == {}


def test_what_is_older_than_it_remembers_is_found_by_looking_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fate_follower, "RECENT_ROWS", 2)
    follower = FateFollower(tmp_path)
    for index in range(6):
        log_fates(tmp_path, fate_of(index))
        follower.find([])
    assert set(follower.find([name(0), name(5)])) == {name(5)}
    follower.look_back()
    assert set(follower.find([name(0), name(5)])) == {name(0), name(5)}


def test_the_first_fate_of_a_group_counts(tmp_path: Path):
    log_fates(tmp_path, fate_of(1), fate_of(1, "dropped:duplicate"))
    assert FateFollower(tmp_path).find([name(1)])[name(1)]["fate"] == "trained"
