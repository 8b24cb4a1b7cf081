"""kill −9 at points of the whole life of a checkpoint: writing, fsync, rename, marker, retention, reading. The newest complete one
always loads, is never older than what was told to be durable, and the next learner goes on.

`ANABRANCH_KILLS` sets how many kills (60 by default), `ANABRANCH_KILL_SEED` which.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter as Counts
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.learner.checkpoint_folder import MARKER, complete_checkpoints, places, read_marker, verify
from anabranch.learner.universal import is_universal, universal_folder
from tests.checkpoint_stores import store
from tests.process.checkpoint_actor import Engine
from tests.zygote import Zygote, is_alive

pytestmark = pytest.mark.process
KILLS = int(os.environ.get("ANABRANCH_KILLS", "60"))
CALLS = {"all": 2500, "finishing": 1200, "retiring": 600}  # about as many as six checkpoints make
ACTOR = "tests.process.checkpoint_actor"


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote(f"{ACTOR}:warm_up")
    yield made
    made.close()


def events(log: Path, event: str) -> list[dict[str, Any]]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [said for line in lines if (said := json.loads(line))["event"] == event]


@pytest.mark.timeout(60 + 2 * KILLS)
def test_whatever_moment_it_is_killed_the_newest_complete_one_loads(tmp_path: Path, zygote: Zygote) -> None:
    random.seed(os.environ.get("ANABRANCH_KILL_SEED"))
    log, output, directory = tmp_path / "events", tmp_path / "output", tmp_path / "check points"
    unfinished: Counts[str] = Counts()
    for number in range(KILLS):
        where = random.choice(list(CALLS))
        die = random.randint(1, CALLS[where])
        pid = zygote.spawn(f"{ACTOR}:checkpoints", output, folder=str(tmp_path), log=str(log), die=die, where=where)
        end = time.monotonic() + 30
        while is_alive(pid):
            assert time.monotonic() < end, f"kill {number}: it neither died nor ended"
            time.sleep(0.002)

        told = max((said["step"] for said in events(log, "durable")), default=0)
        unfinished["aside"] += any(directory.glob(".*.tmp"))
        unfinished["unmarked"] += any(not (p / MARKER).exists() for p in places(directory))
        engine = Engine()
        state = store(tmp_path).load_newest(engine)
        assert engine.step >= told, f"kill {number}"
        assert state == ({"at": engine.step} if engine.step else None)
        for place in complete_checkpoints(directory):
            verify(place, read_marker(place))
    died = events(log, "dies")
    assert len(died) > KILLS // 2, "most fuses were too long to kill anything"
    if KILLS >= 60:
        assert unfinished["aside"], "none was killed while the files lay aside"
        assert unfinished["unmarked"], "none between the rename and the marker, or while old ones were removed"
    text = output.read_text(errors="replace") if output.exists() else ""
    assert "Traceback" not in text, text[-3000:]


def test_whatever_moment_a_conversion_is_killed_it_is_made_again(tmp_path: Path, zygote: Zygote) -> None:
    random.seed(os.environ.get("ANABRANCH_KILL_SEED"))
    log, output = tmp_path / "events", tmp_path / "output"
    left: Counts[str] = Counts()
    engine = Engine()
    for number in range(KILLS // 2):
        engine.step += 1
        place = store(tmp_path, keep=1).save(engine, {})
        for die in (random.randint(1, 330), 0):
            pid = zygote.spawn(f"{ACTOR}:conversion", output, folder=str(tmp_path), log=str(log), die=die)
            end = time.monotonic() + 30
            while is_alive(pid):
                assert time.monotonic() < end, f"conversion {number}: it neither died nor ended"
                time.sleep(0.002)
            left["aside"] += any(place.parent.glob(".universal*"))
            left["unmarked"] += universal_folder(place).exists() and not (universal_folder(place) / MARKER).exists()
        assert is_universal(place), f"conversion {number}"
        verify(universal_folder(place), read_marker(universal_folder(place)))
        assert sorted(p.name for p in place.parent.iterdir()) == [place.name, universal_folder(place).name]
    assert len(events(log, "dies")) > KILLS // 8, "most fuses were too long to kill anything"
    if KILLS >= 60:
        assert left["aside"], "none was killed while the files lay aside"
    if KILLS >= 400:  # a moment so short that sixty may all miss it
        assert left["unmarked"], "none between the rename and the marker"
