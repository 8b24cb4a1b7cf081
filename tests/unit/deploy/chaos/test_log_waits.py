from __future__ import annotations

import json
from pathlib import Path

from anabranch.deploy.chaos.log_waits import append_waits
from anabranch.deploy.chaos.waits import Wait, Waits

AWAY, BACK = "cannot append; groups wait in the spool", "region stream is back"


def log(path: Path, *lines: tuple[int, str]) -> Path:
    """Lines (second, event) among what else a log holds."""
    with path.open("w") as out:
        out.write("a warning of a library\n" + json.dumps({"event": "older", "timestamp": None}) + "\n[1]\n")
        for second, event in lines:
            at = f"2026-01-01T00:{second // 60:02}:{second % 60:02}.250000Z"
            out.write(json.dumps({"event": event, "timestamp": at}) + "\n")
        out.write('{"event": "cut sho')
    return path


def test_a_wait_is_from_the_first_failure_to_the_return(tmp_path: Path) -> None:
    path = log(
        tmp_path / "p.log",
        (5, "producer begins"),
        (10, AWAY),
        (20, "the hub is away"),
        (310, BACK),
        (400, AWAY),
        (402, BACK),
    )
    assert append_waits(path, "east") == [
        Wait("east", "region east: N groups to append", 300.0),
        Wait("east", "region east: N groups to append", 2.0),
    ]


def test_one_without_a_return_lasts_to_the_end_of_the_log_or_the_next_start(tmp_path: Path) -> None:
    path = log(tmp_path / "p.log", (10, AWAY), (70, "x"), (90, "producer begins"), (100, AWAY), (130, "producer ends"))
    assert [wait.seconds for wait in append_waits(path, "east")] == [80.0, 30.0]


def test_no_log_no_wait(tmp_path: Path) -> None:
    assert append_waits(tmp_path / "none.log", "east") == []
    assert append_waits(log(tmp_path / "p.log", (10, BACK)), "east") == []


def test_it_stands_among_those_that_statuses_show() -> None:
    waits = Waits()
    for seconds in (30.0, 300.0, 2.0):
        waits.add(Wait("east", "region east: N groups to append", seconds))
    assert waits.worst() == [Wait("east", "region east: N groups to append", 300.0)]
