"""kill -9 of a process that records steps: what counts is whole, whatever moment it was."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from anabranch.consumers.step_records import read_facts, read_rollouts, recorded_steps

ACTOR = Path(__file__).with_name("step_record_actor.py")
KILLS = 6


@pytest.mark.process
@pytest.mark.timeout(180)
def test_every_record_that_counts_is_whole_after_kills(tmp_path: Path) -> None:
    rng = random.Random(7)
    for epoch in range(1, KILLS + 1):
        actor = subprocess.Popen(
            [sys.executable, "-I", str(ACTOR), str(tmp_path), str(epoch)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert actor.stdout is not None
            assert actor.stdout.readline() == "recording\n"
            end = time.monotonic() + 30
            while not any(place.epoch == epoch for place in recorded_steps(tmp_path / "r")):
                assert time.monotonic() < end, "no record"
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.2))
        finally:
            actor.kill()
            actor.communicate()
        places = [place for place in recorded_steps(tmp_path / "r") if place.epoch == epoch]
        assert [place.step for place in places] == list(range(1, len(places) + 1)), "in order, without a hole"
        for place in places:
            facts = read_facts(place)
            assert read_rollouts(place, facts).num_rows == facts.rollouts == 8
    assert recorded_steps(tmp_path / "r")[-1].epoch == KILLS
