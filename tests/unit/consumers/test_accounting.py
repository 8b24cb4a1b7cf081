"""Every group is whole, open, or in one gap that has a name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from anabranch.consumers.accounting import Account, Judged, account, judge
from anabranch.consumers.run_reader import RunReader
from tests.replay_runs import GROUPS, Made, changed, write_fates, write_recorded, write_run, write_steps


def judged(directory: Path) -> Account:
    with RunReader(directory) as reader:
        return account(reader)


def test_a_whole_run(tmp_path: Path) -> None:
    found = judged(write_run(tmp_path / "run"))
    assert (found.whole, found.open, found.gaps) == (6, 1, {})
    assert found.groups == len(GROUPS)
    assert not found.complete
    assert judged(write_run(tmp_path / "ended", [g for g in GROUPS if g.fate])).complete


def test_a_life_without_all_its_times_is_a_gap_unless_they_are_not_asked_for(tmp_path: Path) -> None:
    old = changed(GROUPS[0], timed=False)
    run = write_run(tmp_path / "run", [old, *GROUPS[1:]])
    found = judged(run)
    assert found.gaps == {"times missing": 1}
    assert found.examples == {"times missing": ["east/east-0-ab/1"]}
    with RunReader(run) as reader:
        assert account(reader, times=False) == Account(6, 1)
        assert judge(reader)["east", "east-0-ab", 1] == Judged(2, "times missing")
        assert judge(reader, times=False)["east", "east-0-ab", 1] == Judged(2, "whole")


@pytest.mark.parametrize("field", ["delivered_ms", "admitted_ms"])
def test_the_learners_times_are_asked_for_too(tmp_path: Path, field: str) -> None:
    run = write_run(tmp_path / "run", GROUPS[:3])
    untold = [one.record().model_copy(update={field: None}) for one in GROUPS[:3]]
    (run / "fates" / "000001.jsonl").write_bytes(b"".join(record.line() for record in untold))
    asked = 3 if field == "delivered_ms" else 2  # the third was refused at its arrival
    assert judged(run).gaps == {"times missing": asked}


def test_an_empty_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert judged(tmp_path) == Account(0, 0)


def test_what_was_never_recorded(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", GROUPS[:3])
    write_fates(run, GROUPS[:4])
    found = judged(run)
    assert found.gaps == {"not recorded": 1}
    assert found.examples == {"not recorded": ["west/west-0-cd/1"]}


def test_a_step_without_a_record(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    shutil.rmtree(run / "steps" / "epoch=2")
    assert judged(run).gaps == {"no step record": 2}


def test_a_step_that_lacks_a_rollout(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    path = next((run / "steps" / "epoch=1").rglob("rank-0.parquet"))
    pq.write_table(pq.read_table(path, partitioning=None).slice(1), path)
    found = judged(run)
    assert found.gaps == {"not in its step": 1}
    assert found.examples["not in its step"] == ["east/east-0-ab/1"]


def test_a_step_that_has_a_group_without_a_fate(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_fates(run, [g for g in GROUPS if g.region == "east"])
    assert judged(run).gaps == {"trained without a fate": 2}


def test_a_group_of_a_step_that_was_given_up_is_open(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_fates(run, [g for g in GROUPS if g.policy.epoch == 2])
    found = judged(run)
    assert found.gaps == {}
    assert found.open == 3, "epoch 1's two groups are in the stream again, and the one that had no fate"


def test_rollouts_that_are_missing_or_twice(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [])
    short: Made = changed(GROUPS[2], rewards=(1.0,))
    write_recorded(run, [short, GROUPS[4]])
    write_recorded(run, [changed(GROUPS[4], index=7)])
    write_fates(run, [GROUPS[2]])
    write_steps(run, [])
    found = judged(run)
    assert found.gaps == {"rollouts missing": 1, "recorded twice": 1}
