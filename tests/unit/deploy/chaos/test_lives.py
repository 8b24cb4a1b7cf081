"""A chaos run's records against its evidence: what ended has a whole life with its times, what is open is on its way."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from anabranch.deploy.chaos.evidence import Evidence, Identity, RegionBooks, read_fate_lines
from anabranch.deploy.chaos.lives import NAME, lives_check
from anabranch.deploy.chaos.verdict import Check
from tests.replay_runs import GROUPS, PRODUCERS, changed, write_fates, write_run

WAITS = Identity("west", PRODUCERS["west"], 2)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def look(run: Path, *, on_its_way: Identity | None = WAITS, ended: Path | None = None) -> Check:
    lines, _ = read_fate_lines((ended or run) / "fates")
    books = RegionBooks(open=Counter([on_its_way] if on_its_way else []))
    return lives_check(run, Evidence(fates=lines, books={"west": books}))


def test_every_trajectory_is_accounted_for(run: Path) -> None:
    assert look(run) == Check(NAME, True, "12 trajectories, all accounted: permit to fate")


def test_what_has_a_fate_and_no_row_is_named(run: Path) -> None:
    for path in (run / "trajectories").rglob("region=west/*.parquet"):
        path.unlink()
    found = look(run)
    assert not found.ok
    assert found.found == "8 trajectories, 2 of 6 groups are not"
    assert found.examples == ("west/west-0-cd/1: not recorded", "west/west-0-cd/3: not recorded")


def test_a_fate_that_the_records_do_not_know_is_named(run: Path, tmp_path: Path) -> None:
    """The evidence has it from elsewhere."""
    more = tmp_path / "more"
    more.mkdir()
    write_fates(more, [*GROUPS, changed(GROUPS[0], seq=77)])
    assert look(run, ended=more).examples == ("east/east-0-ab/77: unknown",)


def test_what_is_open_and_on_its_way_nowhere_is_named(run: Path) -> None:
    assert look(run, on_its_way=None).examples == ("west/west-0-cd/2: open, and on its way nowhere",)


def test_a_life_without_times_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [changed(GROUPS[0], timed=False), *GROUPS[1:]])
    assert look(run).examples == ("east/east-0-ab/1: times missing",)


def test_a_step_without_a_record_is_named(run: Path) -> None:
    shutil.rmtree(run / "steps" / "epoch=2")
    assert [e.partition(": ")[2] for e in look(run).examples] == ["no step record"] * 2


def test_records_that_cannot_be_read_fail_the_check(run: Path) -> None:
    path = next((run / "trajectories").rglob("*.parquet"))
    path.write_bytes(b"PAR1 and nothing else")
    found = look(run)
    assert (found.ok, found.found) == (False, "the records cannot be read")
    assert str(path) in found.examples[0]
