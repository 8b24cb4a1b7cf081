from pathlib import Path

import pytest

from anabranch.learner import bench_turns
from anabranch.learner.bench_turns import Worker
from anabranch.schemas.errors import AnabranchError, DeadlineError

ECHO = """
from anabranch.learner.bench_turns import Link
link = Link()
print("a library talks", flush=True)
link.answer(turn=0)
turn = 0
while link.wait():
    turn += 1
    print("and talks")
    link.answer(turn=turn)
"""


def worker(folder: Path, program: str) -> Worker:
    script = folder / "worker.py"
    script.write_text(program)
    return Worker("echo", [str(script)], folder / "log")


def test_turns_are_answered_in_order_and_prints_are_no_answers(tmp_path):
    echo = worker(tmp_path, ECHO)
    try:
        assert echo.facts == {"turn": 0}
        assert [echo.turn() for _ in range(2)] == [{"turn": 1}, {"turn": 2}]
    finally:
        echo.close()
    assert (tmp_path / "log").read_text().split("\n")[0] == "a library talks"


def test_one_that_ends_is_named_with_what_it_said(tmp_path):
    with pytest.raises(AnabranchError, match=r"(?s)echo.*no model here"):
        worker(tmp_path, "raise SystemExit('no model here')")


def test_one_that_says_nothing_is_not_waited_for_longer_than_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_turns, "TURN_DEADLINE_S", 0.2)
    with pytest.raises(DeadlineError, match=r"0\.2 s waiting for an answer of echo"):
        worker(tmp_path, "import time; time.sleep(60)")
