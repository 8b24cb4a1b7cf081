"""The chaos run as a user starts it: 25 faults with every kind among them, a region that is cut off, and what a killed run leaves.

ANABRANCH_CHAOS_FAULTS sets the number of faults, ANABRANCH_CHAOS_SEED draws others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.deploy.chaos.place import faketime_library
from anabranch.deploy.chaos.schedule import KINDS
from anabranch.deploy.slow_link import why_not
from tests.links import PROGRAM

pytestmark = [pytest.mark.process, pytest.mark.engine, pytest.mark.timeout(1200)]

FAULTS = int(os.environ.get("ANABRANCH_CHAOS_FAULTS", "25"))
SEED = os.environ.get("ANABRANCH_CHAOS_SEED", "1")
END_S = 900 + 12 * FAULTS
CHECKS = {
    "evidence complete and readable", "groups lost", "deliveries with more than one end", "groups trained twice in one epoch",
    "groups trained twice in the whole run", "ledger exact in every region", "ledger equal to the fate log",
    "groups of all steps equal to the fate log", "exits that nobody should see", "tracebacks in the logs",
    "waits beyond their deadline", "trajectories accounted for, permit to fate",
}  # fmt: skip


class Run:
    """`anabranch chaos run`; `close` ends it."""

    def __init__(self, root: Path, *words: str) -> None:
        if lacking := why_not(PROGRAM):
            pytest.skip(f"no chaos run: {lacking}")
        self.root, self.directory = root, root / "a b"
        (root / "tmp").mkdir()
        self.log = root / "output"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-I", "-m", "anabranch.cli.main", "chaos", "run", "--program", str(PROGRAM),
                    "--dir", str(self.directory), *words,
                ],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=root, env={**os.environ, "TMPDIR": str(root / "tmp")},
            )  # fmt: skip

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.directory / "report.json").read_text())
        return report

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def left(self) -> list[str]:
        """Processes, mounts and temporary folders of the run."""
        mark, found = str(self.root), []
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) in (os.getpid(), self.process.pid):
                continue
            place = Path("/proc", name)
            try:
                words = (place / "cmdline").read_bytes() + (place / "environ").read_bytes()
            except OSError:
                continue
            if mark.encode() in words:
                found.append(f"process {name}: {(words[:200])!r}")
        found += [
            line for line in Path("/proc/self/mountinfo").read_text().splitlines() if mark in line.replace("\\040", " ")
        ]
        return found + [str(path) for path in (self.root / "tmp").iterdir()]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(90)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*words: str) -> Run:
        runs.append(Run(tmp_path, *words))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def wait_for(condition: Callable[[], object], what: Callable[[], str], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"gave up waiting for {what()}"
        time.sleep(0.1)


def namespaces() -> set[str]:
    """Those of the machine that are called as those of a run, which are in a mount namespace of its own and not there."""
    there = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    return {"hub", "east", "west"}.intersection(there)


def test_every_kind_of_fault_and_every_group_accounted_for(start: Callable[..., Run]) -> None:
    run = start("--faults", str(FAULTS), "--seed", SEED, "--seconds-between", "4")
    assert run.process.wait(END_S) == 0, run.said()
    report = run.report()
    checks = {check["name"]: check for check in report["checks"]}
    assert checks.keys() >= CHECKS
    assert all(check["ok"] for check in checks.values())
    expected = KINDS.keys() if faketime_library() else KINDS.keys() - {"clock step of a Redis"}
    if len(KINDS) <= FAULTS:
        assert {fault["kind"] for fault in report["faults"]} == expected
    assert checks["trajectories accounted for, permit to fate"]["found"].endswith(
        "trajectories, all accounted: permit to fate"
    )
    assert all(fault["phase"] == "healed" for fault in report["faults"])
    assert report["exits"]["learner: killed by SIGKILL"] >= 1
    ledger = report["ledger"]
    assert set(ledger) == {"east", "west"}
    assert all(books["fates"]["trained"] > 0 for books in ledger.values())
    assert sum(books["foreign"] for books in ledger.values()) >= 1
    assert sum(books["fates"]["dropped:dead_letter"] for books in ledger.values()) >= 2, "garbage and a corrupt entry"
    text = (run.directory / "report.md").read_text()
    assert "| kill learner |" in text
    assert (run.directory / "report.svg").exists()
    assert run.left() == []
    assert namespaces() == set()


def test_a_region_that_is_cut_off(start: Callable[..., Run]) -> None:
    run = start("--scenario", "cut", "--seconds", "20")
    assert run.process.wait(600) == 0, run.said()
    report = run.report()
    assert all(check["ok"] for check in report["checks"])
    (rows,) = report["tables"].values()
    assert rows[1][0] == "steps per minute"
    assert "during" in rows[1][1]


def test_a_run_that_is_killed_leaves_nothing(start: Callable[..., Run]) -> None:
    run = start("--faults", "5")
    wait_for(lambda: "chaos: starting" in run.said() or run.process.poll() is not None, run.said, 300)
    assert run.process.poll() is None, run.said()
    assert len(run.left()) > 5, "servers, links and clients"
    assert namespaces() == set()
    run.process.kill()
    run.process.wait(10)
    wait_for(lambda: not run.left(), lambda: f"{run.left()} to be gone", 60)
    assert namespaces() == set()


def test_ctrl_c_ends_with_a_report(start: Callable[..., Run]) -> None:
    run = start("--faults", "50", "--only", "link-cut")
    wait_for(lambda: "fault 2 of" in run.said() or run.process.poll() is not None, run.said, 400)
    assert run.process.poll() is None, run.said()
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(120) == 75, run.said()
    report = run.report()
    assert report["ended"] == "interrupted by SIGINT"
    assert next(c for c in report["checks"] if c["name"] == "groups lost")["ok"]
    assert run.left() == []
