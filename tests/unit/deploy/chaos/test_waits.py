from __future__ import annotations

from typing import Any

from anabranch.deploy.chaos.waits import Wait, Waits


def learner(step: int, what: str, updated_ms: float) -> dict[str, Any]:
    return {"step": step, "epoch": 1, "waiting_for": what, "updated_ms": updated_ms}


def test_a_wait_is_as_long_as_nothing_moves() -> None:
    waits = Waits()
    for now, step, what in [(0, 5, "8 more groups of 8"), (1, 5, "3 more groups of 8"), (9, 5, "2 more groups of 8; region east unreachable"),
                            (10, 6, "8 more groups of 8"), (12, 6, "8 more groups of 8"), (13, 6, ""), (20, 6, "")]:  # fmt: skip
        waits.saw("learner", learner(step, what, now), float(now))
    assert waits.worst() == [Wait("learner", "N more groups of N", 9.0)]


def test_another_reason_is_another_wait_and_the_longest_counts() -> None:
    waits = Waits()
    for now, what in [
        (0, "permits"),
        (4, "permits"),
        (5, "weights e1.v3"),
        (8, "weights e1.v3"),
        (9, "permits"),
        (10, "permits"),
    ]:
        waits.saw(
            "east-0", {"region": "east", "pid": 1, "groups_done": 4, "waiting_for": what, "updated_ms": now}, float(now)
        )
    assert waits.worst() == [Wait("east", "permits", 4.0), Wait("east", "weights eNvN", 3.0)]


def test_a_process_that_was_started_anew_waits_anew() -> None:
    waits = Waits()
    for now, pid in [(0, 1), (30, 1), (31, 2), (40, 2)]:
        waits.saw(
            "east-0",
            {"region": "east", "pid": pid, "groups_done": 0, "waiting_for": "permits", "updated_ms": now},
            float(now),
        )
    assert waits.worst() == [Wait("east", "permits", 30.0)]


def test_a_status_that_nobody_refreshes_is_no_wait() -> None:
    waits = Waits()
    for now, updated in [(0, 0), (2, 2), (10, 2), (40, 2)]:
        waits.saw("learner", learner(5, "the hub", updated), float(now))
    assert waits.worst() == [Wait("learner", "the hub", 2.0)]


def test_where_the_run_lies_is_not_told() -> None:
    waits = Waits()
    for now in (0.0, 1.0, 2.0):
        waiting_for = "the disk to take the spool's writes (/home/x/run-7/disks/spool-west/chaos/west/0)"
        waits.saw("p", {"region": "west", "waiting_for": waiting_for, "updated_ms": now}, now)
    assert list(waits.longest) == [("west", "the disk to take the spool's writes (disks/spool-west/chaos/west/N)")]
