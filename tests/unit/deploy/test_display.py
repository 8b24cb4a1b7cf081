"""The screen as a pure function of records."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from anabranch.deploy.display import ChildLine, RunView, alarms, render
from anabranch.deploy.glyphs import bar, duration, log_line, size, sparkline
from anabranch.deploy.history import History, read_history
from anabranch.schemas.metrics import LearnerStatus, ProducerStatus, StepRecord

NOW_MS = 1_700_000_020_500


def producer(region: str, policy: str, **changes: object) -> ProducerStatus:
    values: dict[str, object] = {
        "updated_ms": NOW_MS - 400, "region": region, "pid": 4242, "state": "sampling", "policy": policy,
        "tokens_per_s": 1203.4, "groups_running": 8, "swaps": 12, "last_swap_pause_ms": 13.4, "publish_to_serve_ms": 412.0,
    }  # fmt: skip
    return ProducerStatus.model_validate(values | changes)


@pytest.fixture
def view(run_dir: Path) -> RunView:
    return RunView(
        title="tiny-test",
        history=read_history(run_dir / "metrics.jsonl"),
        learner=LearnerStatus(
            updated_ms=NOW_MS,
            state="waiting",
            waiting_for="batch 41: 12 of 32 groups",
            step=40,
            steps_total=40,
            epoch=1,
            version=40,
        ),
        producers={"east-0": producer("east", "e1.v39"), "west-0": producer("west", "e1.v37")},
        children=[
            ChildLine("hub", "running"),
            ChildLine("learner", "running"),
            ChildLine("producer-east-0", "running", restarts=2),
        ],
        phase="training",
        elapsed_s=193,
        now_ms=NOW_MS,
    )


def screen(view: RunView, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, legacy_windows=False)
    console.print(render(view, width=width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_everything_asked_for_is_on_the_screen(view: RunView) -> None:
    text = "\n".join(screen(view, 100))
    for expected in (
        "tiny-test", "step 40/40", "100%", "ETA 0:00", "waiting for batch 41: 12 of 32 groups", "0.412 (v0) -> 0.835 (v40)",
        "east", "1,203", "12", "e1.v39", "13 ms", "0.41 s", "sampling", "47%", "700", "delta 61.0 kB of 1.9 MB full (3.2%)",
        "ESS 0.95", "3 of 3 running, 2 restarts  producer-east-0 running 2x", "0.45 s a step: wait 0.10 s (22%)", "alarms  none", "3:13",
    ):  # fmt: skip
        assert expected in text, f"{expected!r} is missing from\n{text}"


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_it_fits_the_terminal_and_keeps_its_height(
    view: RunView, step_record: Callable[..., StepRecord], width: int
) -> None:
    heights = set()
    for step in range(1, 41):
        changed = dataclasses.replace(view, history=History())
        changed.history.add(step_record(step, age_tokens={step % 12: 10**step % 10**9}, dropped={"age": step % 2}))
        lines = screen(changed, width)
        assert max(map(len, lines)) <= width
        heights.add(len(lines))
    assert len(heights) == 1
    assert heights.pop() <= 30


def test_many_producers_do_not_push_the_rest_off_the_screen(view: RunView) -> None:
    view.producers = {f"east-{n}": producer("east", "e1.v39") for n in range(40)}
    lines = screen(view, 100)
    assert len(lines) <= 30
    assert any("30 more producers" in line for line in lines)


def test_before_anything_is_known_it_says_what_it_waits_for() -> None:
    lines = screen(RunView(title="tiny-test", phase="making the model: step 120 of 450"), 100)
    assert "making the model: step 120 of 450" in lines[0]
    assert "step 0/?" in lines[1]


def test_plain_ascii_where_the_terminal_has_nothing_else(view: RunView) -> None:
    view.ascii_only = True
    assert all(line.isascii() for line in screen(view, 100))


def test_alarms_name_who_and_why(view: RunView, step_record: Callable[..., StepRecord]) -> None:
    view.history.add(step_record(41, gates=["ess_token = 0.21, below"], skipped_groups=4, dropped={"age": 3}))
    view.producers["west-0"] = producer("west", "e1.v37", updated_ms=NOW_MS - 60_000)
    view.producers["east-0"] = producer("east", "e1.v39", last_error="digest mismatch")
    view.children.append(ChildLine("recorder", "backoff", 1, "killed by SIGKILL"))
    text = "\n".join(alarms(view))
    for expected in (
        "recorder is backoff: killed by SIGKILL", "west-0 silent for 60 s", "east-0: digest mismatch", "gate: ess_token = 0.21, below; 4 groups kept",
        "dropped 3 group(s): age",
    ):  # fmt: skip
        assert expected in text
    assert "! alarm recorder is backoff" in "\n".join(screen(view, 100))


def test_what_the_learner_finds_wrong_is_an_alarm(view: RunView) -> None:
    assert view.learner is not None
    view.learner = view.learner.model_copy(
        update={
            "alarms": ("1 groups are missing from the ledger of region west",),
            "notes": ("region east: 1 entries that no producer appended",),
            "regions": {"east": "reading for 9 s", "west": "unreachable for 70 s (no route)"},
        }
    )
    assert alarms(view) == [
        "1 groups are missing from the ledger of region west", "region west: unreachable for 70 s (no route)",
        "region east: 1 entries that no producer appended",
    ]  # fmt: skip


@pytest.mark.parametrize(("state", "silent_s", "alarmed"), [
    ("stepping", 55, False), ("stepping", 65, True), ("waiting for a batch", 55, True),
])  # fmt: skip
def test_a_learner_may_be_silent_for_as_long_as_its_steps_take(
    view: RunView, step_record: Callable[..., StepRecord], state: str, silent_s: int, alarmed: bool
) -> None:
    view.history.add(step_record(41, step_s=30.0))
    assert view.learner is not None
    view.learner = view.learner.model_copy(update={"state": state, "updated_ms": NOW_MS - 1000 * silent_s})
    assert any("learner silent" in alarm for alarm in alarms(view)) == alarmed


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([], 10, ""),
        ([0.0, 0.5, 1.0], 10, "▁▅█"),
        ([0.0, 0.0, 1.0, 1.0], 2, "▁█"),
        ([-5.0, 7.0], 2, "▁█"),
        ([float("nan")], 4, "?"),
    ],
)
def test_sparkline(values: list[float], width: int, expected: str) -> None:
    assert sparkline(values, width) == expected


def test_small_words() -> None:
    assert [duration(x) for x in (None, float("inf"), -3, 59.9, 61, 3723)] == [
        "-",
        "-",
        "0:00",
        "0:59",
        "1:01",
        "1:02:03",
    ]
    assert [size(x) for x in (12, 61_234, 1_900_000, 3e12)] == ["12 B", "61.2 kB", "1.9 MB", "3000.0 GB"]
    assert [bar(x, 4) for x in (0, 0.5, 1, 7)] == ["░░░░", "██░░", "████", "████"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("anabranch: ConfigError: no", "anabranch: ConfigError: no"),
        ('{"torn": ', '{"torn": '),
        ('{"no": "event"}', '{"no": "event"}'),
        ('{"service": "producer", "region": "east", "event": "swap refused", "policy": "e1.v3", "level": "warning", "timestamp": "x"}',
         "warning: swap refused policy=e1.v3"),
        ('{"event": "ready", "level": "info", "seconds": 2}', "ready seconds=2"),
    ],
)  # fmt: skip
def test_log_lines_for_people(line: str, shown: str) -> None:
    assert log_line(line) == shown
