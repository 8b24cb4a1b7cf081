"""A life on a terminal."""

from __future__ import annotations

from pathlib import Path

from anabranch.consumers.accounting import Account
from anabranch.consumers.life import life_of
from anabranch.consumers.run_reader import RunReader
from anabranch.deploy.replay_life import account_json, as_json, render, render_account
from anabranch.schemas.trajectory_id import parse_id
from tests.replay_runs import GROUPS, changed, write_run


def test_what_no_record_tells_is_shown_as_unknown(tmp_path: Path) -> None:
    groups = [changed(one, timed=False) for one in GROUPS]
    with RunReader(write_run(tmp_path / "run", groups, steps=False)) as reader:
        life = life_of(reader, parse_id("east/east-0-ab/1/0"))
    shown = render(life, 100)
    lines = shown.splitlines()
    assert lines[0] == "east/east-0-ab/1/0: trained"
    assert any(line.startswith("-") and " permit " in line for line in lines)
    assert "2026-01-01 00:00:10.000  appended" in shown
    assert lines[-1] == "missing: there is no record of step 1 of epoch 1: its weight and ratios are unknown"
    assert all(len(line) <= 100 for line in lines[:-1])
    assert [m["stage"] for m in as_json(life)["moments"]][:2] == ["permit", "submitted"]


def test_every_moment_of_a_recorded_life_has_its_time_and_its_clock(tmp_path: Path) -> None:
    with RunReader(write_run(tmp_path / "run")) as reader:
        lines = render(life_of(reader, parse_id("east/east-0-ab/1/0")), 200).splitlines()[2:]
    assert len(lines) == 12
    assert all(line.startswith("20") or line.startswith("1970") for line in lines), (
        "a step's record of the tests is of 1970"
    )
    assert all(line.endswith(" clock)") for line in lines)


def test_an_account_names_its_gaps() -> None:
    found = Account(7, 1, {"not recorded": 6}, {"not recorded": [f"east/p/{i}" for i in range(6)]})
    first, second = render_account(found).splitlines()
    assert first == "14 groups: 7 have a whole life in the records, 1 have no fate yet"
    assert second.startswith("6 not recorded: it has a fate, and the recorder has no row of it; east/p/0, ")
    assert second.endswith("east/p/4, ...")
    assert account_json(found)["groups"] == 14
