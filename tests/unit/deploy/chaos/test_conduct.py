from __future__ import annotations

from pathlib import Path

from anabranch.deploy.chaos import conduct
from anabranch.deploy.chaos.ending import tracebacks
from anabranch.deploy.chaos.fault import Phase
from anabranch.deploy.chaos.schedule import choose, draw, make
from anabranch.deploy.chaos.waits import Wait
from anabranch.schemas.config import RunConfig

CONFIG = RunConfig()


def test_exits() -> None:
    good = conduct.exits_check({"learner": [-9, 75, 0], "redis-east": [-9, -9]})
    assert good.ok
    assert good.found == "3 × SIGKILL, 1 × exit 0, 1 × exit 75"
    for code in (70, 76, 78, 2, 1, -6, -11):
        bad = conduct.exits_check({"learner": [-9, code]})
        assert (bad.ok, bad.examples) == (False, (f"learner: exit {code}",))


def test_waits() -> None:
    deadline = CONFIG.learner.batch_deadline_s
    within = Wait("learner", "N more groups of N", deadline + 1)
    beyond = Wait("learner", "N more groups of N", deadline + conduct.TOLERANCE_S + 1)
    assert conduct.waits_check([within], CONFIG).ok
    found = conduct.waits_check([beyond, within], CONFIG)
    assert not found.ok
    assert "learner waited 616 s for N more groups of N" in found.examples
    assert conduct.waits_check([], CONFIG).ok


def test_a_region_is_waited_for_as_long_as_a_full_spool() -> None:
    config = RunConfig.model_validate({"spool": {"full_deadline_s": 1000.0}})
    for what in ("region east: N groups to append", "room in the spool (/spool/east/N)", "the disk to take the writes"):
        assert conduct.waits_check([Wait("east", what, 1000)], config).ok
        assert not conduct.waits_check([Wait("east", what, 1016)], config).ok


def test_faults_that_did_not_heal() -> None:
    plans = draw(faults=3, seed=1, seconds_between=1.0, regions=("east",), kinds=choose(()))
    faults = [make(plan) for plan in plans]
    for fault in faults:
        fault.phase = Phase.HEALED
    assert conduct.faults_check(faults, 3).ok
    assert not conduct.faults_check(faults, 4).ok, "one never came"
    faults[1].phase = Phase.OVERDUE
    check = conduct.faults_check(faults, 3)
    assert (check.ok, check.found, check.examples) == (False, "2 of 3", (faults[1].describe(),))


def test_steps() -> None:
    assert conduct.steps_check(10, 10).ok
    assert not conduct.steps_check(9, 10).ok


def test_tracebacks_are_found_with_their_last_line(tmp_path: Path) -> None:
    (tmp_path / "learner.log").write_text(
        '{"event": "started"}\nTraceback (most recent call last):\n  File "x.py", line 1, in f\n    g()\n'
        'KeyError: 3\n{"event": "next"}\n'
    )
    (tmp_path / "recorder.log").write_text("Traceback is a word\n")
    found = tracebacks(tmp_path)
    assert found == ["learner.log: KeyError: 3"]
    assert not conduct.tracebacks_check(found).ok
    assert conduct.tracebacks_check([]).ok
