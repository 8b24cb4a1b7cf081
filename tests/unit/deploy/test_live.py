"""What a user sees while it runs: JSON lines off a terminal, a screen on one."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.deploy.live import Monitor
from anabranch.schemas.errors import StreamUnavailableError
from anabranch.schemas.metrics import LearnerStatus, ProducerStatus, Record, StepRecord
from anabranch.transport.boards import RunBoard
from anabranch.transport.memory_boards import MemoryRunBoard
from anabranch.transport.metrics_log import MetricsLog, parse_record


class Terminal(io.StringIO):
    """Text that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Process:
    """As much of a supervised child as the screen shows."""

    def __init__(self, pid: int) -> None:
        self.spec = type("Spec", (), {"name": f"child-{pid}"})()
        self.state = type("State", (), {"value": "running"})()
        self.pid, self.restarts, self.last_exit = pid, 0, ""


def monitor(run_dir: Path, out: io.StringIO, board: RunBoard | None = None, *, pids: tuple[int, ...] = (1,)) -> Monitor:
    def connect() -> RunBoard:
        if board is None:
            raise StreamUnavailableError("no hub")
        return board

    return Monitor(run_dir, connect_board=connect, children=lambda: [Process(p) for p in pids], out=out)  # type: ignore[misc]


def status(**changes: object) -> ProducerStatus:
    values: dict[str, object] = {
        "updated_ms": time.time_ns() // 1_000_000, "region": "east", "pid": 1, "state": "sampling", "policy": "e1.v3",
        "swaps": 1, "last_swap_pause_ms": 12.5, "publish_to_serve_ms": 300.0,
    }  # fmt: skip
    return ProducerStatus.model_validate(values | changes)


def test_off_a_terminal_each_record_is_one_json_line_and_reads_back(tmp_path: Path, records: list[Record]) -> None:
    log, out = MetricsLog(tmp_path), io.StringIO()
    with monitor(tmp_path, out) as it:
        for record in records:
            log.append(record)
        it.finish()
        it.finish()
    log.close()
    assert [parse_record(line) for line in out.getvalue().splitlines()] == records


def test_records_of_an_earlier_part_of_the_run_are_known_but_not_said_again(
    run_dir: Path, step_record: Callable[..., StepRecord]
) -> None:
    out = io.StringIO()
    with monitor(run_dir, out) as it:
        log = MetricsLog(run_dir)
        log.append(step_record(41, steps_total=60))
        log.close()
        it.finish()
        assert len(it.view.history.steps) == 41
    assert [json.loads(line)["step"] for line in out.getvalue().splitlines()] == [41]


def test_phases_and_new_alarms_are_lines_too_each_once(tmp_path: Path, step_record: Callable[..., StepRecord]) -> None:
    log, out = MetricsLog(tmp_path), io.StringIO()
    with monitor(tmp_path, out) as it:
        it.phase("making the model")
        it.phase("making the model")
        for step in (1, 2, 3):
            log.append(step_record(step, gates=[f"ess_token = {0.1 + step / 100}"]))
            it.finish()
    log.close()
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [e["event"] for e in events] == ["phase", "step", "alarm", "step", "step"]
    assert events[2]["alarm"].startswith("gate: ess_token = 0.11")


def test_on_a_terminal_the_screen_shows_metrics_and_board(run_dir: Path) -> None:
    board, out = MemoryRunBoard(), Terminal()
    now_ms = time.time_ns() // 1_000_000 + 100
    board.report_learner(
        LearnerStatus(
            updated_ms=now_ms, state="waiting", waiting_for="batch 41", step=40, steps_total=40, epoch=1, version=40
        )
    )
    board.report_producer("east-1", status())
    board.report_producer("east-of-a-dead-process", status(pid=99, policy="e1.v1"))
    with monitor(run_dir, out, board) as it:
        it.tick()
        it.finish()
        assert list(it.view.producers) == ["east-1"]
    assert "waiting for batch 41" in out.getvalue()
    assert "e1.v3" in out.getvalue()
    assert "e1.v1" not in out.getvalue()


def test_each_swap_seen_is_sampled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.deploy.live.BOARD_EVERY_S", 0.0)
    board = MemoryRunBoard()
    with monitor(tmp_path, io.StringIO(), board) as it:
        for report in (
            status(swaps=0, policy=""),
            status(),
            status(),
            status(policy="e1.v4", swaps=2, last_swap_pause_ms=9.0),
        ):
            board.report_producer("east-1", report)
            it.tick()
    swaps = [json.loads(line) for line in (tmp_path / "swaps.jsonl").read_text().splitlines()]
    assert [(s["swap"], s["policy"], s["pause_ms"]) for s in swaps] == [(1, "e1.v3", 12.5), (2, "e1.v4", 9.0)]


def test_a_hub_that_is_away_costs_nothing_but_its_part_of_the_screen(run_dir: Path) -> None:
    with monitor(run_dir, Terminal()) as it:
        it.tick()
        assert it.view.learner is None
        assert len(it.view.history.steps) == 40


def test_a_terminal_without_unicode_gets_plain_characters(run_dir: Path) -> None:
    class Old(Terminal):
        encoding = "ascii"

    out = Old()
    with monitor(run_dir, out) as it:
        it.finish()
    assert out.getvalue().isascii()
    assert os.linesep in out.getvalue()


def test_what_a_learner_left_on_the_board_before_a_resume_is_not_shown(run_dir: Path) -> None:
    board = MemoryRunBoard()
    board.report_learner(
        LearnerStatus(updated_ms=1_700_000_000_000, state="done", step=40, steps_total=40, epoch=1, version=40)
    )
    with monitor(run_dir, io.StringIO(), board) as it:
        it.tick()
        assert it.view.learner is None
