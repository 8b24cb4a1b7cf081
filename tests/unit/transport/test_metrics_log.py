"""What is in `metrics.jsonl` can be read, whatever happened while it was written."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.schemas.metrics import EvaluationRecord, NoteRecord
from anabranch.transport.metrics_log import METRICS_FILE, MetricsLog, parse_record, read_records
from tests.limits import file_size_limit


def note(what: str, **detail: str | int | float | bool | None) -> NoteRecord:
    return NoteRecord(time_ms=1, what=what, detail=detail)


def whats(path: Path) -> list[str]:
    return [r.what for r in read_records(path) if isinstance(r, NoteRecord)]


def test_records_come_back_in_order_and_with_their_type(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "runs" / "new run")
    evaluation = EvaluationRecord(
        time_ms=2, epoch=1, version=0, prompts=8, mean_reward=0.5, standard_error=0.1, temperature=1.0, seconds=3.0
    )
    sent = [note("started", epoch=1), evaluation, note("line\nbreaks and α", ok=True)]
    for record in sent:
        log.append(record)
    log.close()
    assert log.path == tmp_path / "runs" / "new run" / METRICS_FILE
    assert list(read_records(log.path)) == sent


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for what in ("started", "resumed"):
        log = MetricsLog(tmp_path)
        log.append(note(what))
        log.close()
    assert whats(tmp_path / METRICS_FILE) == ["started", "resumed"]


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_line_torn_by_a_crash_costs_itself_alone(tmp_path: Path, cut: int) -> None:
    log = MetricsLog(tmp_path)
    log.append(note("first"))
    log.append(note("torn"))
    log.close()
    content = log.path.read_bytes()
    log.path.write_bytes(content[:-cut])
    assert whats(log.path) == (["first", "torn"] if cut == 1 else ["first"]), "readable while it is torn"
    log = MetricsLog(tmp_path)
    log.append(note("next"))
    log.close()
    assert whats(log.path)[-1] == "next"
    assert whats(log.path)[0] == "first"


def test_a_disk_that_fills_up_in_mid_line_costs_that_line_alone(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append(note("first"))
    with file_size_limit(log.path.stat().st_size + 10):
        with pytest.raises(OSError, match="only 10 of"):
            log.append(note("does not fit"))
        with pytest.raises(OSError, match="too large"):
            log.append(note("nor this"))
    log.append(note("after"))
    log.close()
    assert whats(log.path) == ["first", "after"]


def test_readers_see_whole_lines_while_writers_append(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    again = MetricsLog(tmp_path)

    def write(of: MetricsLog, name: str) -> None:
        for number in range(150):
            of.append(note(f"{name}{number}", padding="x" * 3000))

    threads = [threading.Thread(target=write, args=(log, "a")), threading.Thread(target=write, args=(again, "b"))]
    for thread in threads:
        thread.start()
    while any(t.is_alive() for t in threads):
        for line in log.path.read_text().splitlines(keepends=True):
            assert parse_record(line) is not None or not line.endswith("\n")
    for thread in threads:
        thread.join()
    assert sorted(whats(log.path)) == sorted(f"{n}{i}" for n in "ab" for i in range(150))
    log.close()
    again.close()


def test_numbers_gone_wrong_come_back(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append(
        EvaluationRecord(
            time_ms=2,
            epoch=1,
            version=0,
            prompts=8,
            mean_reward=math.nan,
            standard_error=math.inf,
            temperature=1,
            seconds=3,
        )
    )
    log.close()
    (back,) = read_records(log.path)
    assert isinstance(back, EvaluationRecord)
    assert math.isnan(back.mean_reward)
    assert back.standard_error == math.inf


def test_lines_of_others_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    path.write_bytes(b'\n{"event":"note","time_ms":1,"what":"a"}\nnot json\n\xff\xfe\n{"event":"newer","x":1}\n[]\n')
    assert whats(path) == ["a"]


@given(st.text(max_size=60))
def test_any_line_is_a_record_or_nothing(line: str) -> None:
    assert parse_record(line) is None


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(read_records(tmp_path / METRICS_FILE))
