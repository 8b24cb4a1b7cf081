from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from anabranch.deploy.chaos import stepped_clock


def test_the_wall_clock_follows_the_file_and_the_monotonic_one_does_not(tmp_path: Path) -> None:
    file = tmp_path / "clock"
    stepped_clock.write_offset(file, 0)
    real_ns, real = time.time_ns, time.time
    undo = stepped_clock.install(file)
    try:
        for step in (0.0, 3600.0, -3600.0, 1.5):
            stepped_clock.write_offset(file, step)
            before = time.monotonic()
            assert time.time() - real() == pytest.approx(step, abs=0.5)
            assert (time.time_ns() - real_ns()) / 1e9 == pytest.approx(step, abs=0.5)
            assert time.monotonic() - before < 60
    finally:
        undo()
    assert time.time is real


def test_it_runs_the_program(tmp_path: Path) -> None:
    stepped_clock.write_offset(tmp_path / "clock", 0)
    program = [sys.executable, "-I", "-m", "anabranch.deploy.chaos.stepped_clock", str(tmp_path / "clock")]
    done = subprocess.run([*program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "anabranch"), done.stderr
