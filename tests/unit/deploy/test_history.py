"""metrics.jsonl, read while it is being written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.deploy.history import MetricsTail, read_history
from anabranch.schemas.metrics import EvaluationRecord, Record, StepRecord


def test_a_torn_line_counts_when_it_is_complete_and_only_once(tmp_path: Path, records: list[Record]) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.poll() == []
    text = "".join(r.model_dump_json() + "\n" for r in records).encode()
    seen = []
    with path.open("ab", buffering=0) as file:
        for start in range(0, len(text), 777):  # cuts nearly every line somewhere
            file.write(text[start : start + 777])
            seen += tail.poll()
    assert seen == records
    assert tail.history.unreadable_lines == 0
    assert tail.poll() == []


def test_an_unreadable_line_costs_that_line_alone(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text(
        "\n".join([*lines[:5], '{"event": "step", "step": 4', '{"event": "of a later release"}', "", *lines[5:]]) + "\n"
    )
    history = read_history(path)
    assert len(history.steps) == 40
    assert history.unreadable_lines == 2


def test_a_step_done_again_after_a_restart_replaces_what_followed(step_record: Callable[..., StepRecord]) -> None:
    tail = MetricsTail(Path("unused"))
    for step in (1, 2, 3, 4):
        tail.history.add(step_record(step, epoch=1))
    for step in (3, 4, 5):
        tail.history.add(step_record(step, epoch=2))
        assert list(tail.history.steps)[-1] == step
    assert [(s.step, s.epoch) for s in tail.history.steps.values()] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]


def test_before_is_the_first_evaluation_and_after_needs_later_weights(run_dir: Path, records: list[Record]) -> None:
    history = read_history(run_dir / "metrics.jsonl")
    assert history.before is not None
    assert history.after is not None
    assert (history.before.mean_reward, history.after.mean_reward) == (0.412, 0.835)
    history.evaluations = [e for e in records if isinstance(e, EvaluationRecord)][
        :1
    ] * 2  # evaluated twice at version 0
    assert history.after is None


def test_a_file_that_was_replaced_is_read_afresh(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    tail = MetricsTail(path)
    tail.poll()
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]))
    assert len(tail.poll()) == 3
    assert list(tail.history.steps) == [1]


def test_a_missing_file_is_an_error_only_for_a_recorded_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_history(tmp_path / "metrics.jsonl")
