from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from anabranch.deploy.chaos.evidence import FateLine, Identity
from anabranch.deploy.chaos.outages import CutOff, OutOfMemory, ends_of
from anabranch.schemas.config import load_config


def test_what_waited_is_followed_to_its_end() -> None:
    waited = {Identity("east", "p", seq) for seq in (4, 5, 6)}
    lines = [FateLine(Identity("east", "p", seq), seq, fate, 1)
             for seq, fate in [(3, "trained"), (4, "trained"), (5, "dropped:age")]]  # fmt: skip
    lines.append(FateLine(Identity("west", "p", 6), 6, "trained", 1))
    assert ends_of(lines, waited) == {"trained": 1, "dropped:age": 1}


def test_steps_per_minute_of_each_part() -> None:
    cut = CutOff(20.0)
    steps = [1.0, 2.0, 3.0, 11.0, 29.0]
    assert cut.per_minute(steps, 0.0, 10.0) == 18.0
    assert cut.per_minute(steps, 10.0, 30.0) == 6.0
    assert cut.per_minute(steps, 30.0, 30.0) == 0.0


def test_a_producer_waits_for_its_region_longer_than_the_cut_lasts() -> None:
    for seconds in (20.0, 300.0, 4000.0):
        assert load_config(overrides=CutOff(seconds).overrides).spool.full_deadline_s >= seconds + 120
    assert not OutOfMemory(60.0).overrides


def test_a_run_that_ended_before_the_cut_has_seen_no_wait(tmp_path: Path) -> None:
    lab = SimpleNamespace(place=SimpleNamespace(directory=tmp_path))
    assert CutOff(300.0).waits(lab) == []  # type: ignore[arg-type]
