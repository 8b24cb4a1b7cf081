"""The thread that publishes: order, what it owes whoever waits, and that work is never behind idling."""

from __future__ import annotations

import threading

import pytest
from structlog.testing import capture_logs

from anabranch.learner.publish_worker import PublishWorker, WorkerState
from anabranch.schemas.errors import AnabranchError, DeadlineError, StreamUnavailableError
from tests.publishers import Gate


def wait(worker: PublishWorker, deadline_s: float = 20.0) -> None:
    worker.wait(lambda: worker.is_quiet, deadline_s=deadline_s, what="the test's work", heartbeat=lambda: None)


def test_work_is_done_in_order_in_one_thread_and_idling_goes_on_after_it() -> None:
    done: list[object] = []
    left = iter([None, None, 0.0, 0.0, 0.001, None, 0.0, None])

    def idle() -> float | None:
        done.append("idle")
        return next(left)

    worker = PublishWorker("w", idle, at_end=lambda: done.append("end"))
    gate = Gate()
    worker.submit(gate.pass_through)
    for k in range(3):
        worker.submit(lambda k=k: done.append((k, threading.current_thread().name)))
    assert done == []
    gate.open()
    wait(worker)
    assert done == ["idle", (0, "w"), "idle", (1, "w"), "idle", (2, "w"), "idle", "idle", "idle"]
    worker.submit(lambda: done.append("more"))
    wait(worker)
    worker.close(deadline_s=20)
    assert done[9:] == ["more", "idle", "idle", "end"]
    assert worker.state is WorkerState.CLOSED


def test_work_waits_for_one_call_of_idle_at_most() -> None:
    gate, calls, order = Gate(), [], []

    def idle() -> float | None:
        calls.append(0)
        if len(calls) == 2:
            gate.pass_through()
        order.append("idle")
        return 0.0 if len(calls) < 1000 else None

    worker = PublishWorker("w", idle)
    worker.submit(lambda: None)
    assert gate.reached.wait(20)
    worker.submit(lambda: order.append("work"))
    gate.open()
    wait(worker)
    worker.close(deadline_s=20)
    assert order[:3] == ["idle", "idle", "work"]


def test_the_first_failure_is_raised_everywhere_and_nothing_is_done_after_it() -> None:
    done: list[str] = []

    def fail() -> None:
        raise StreamUnavailableError("the store is gone")

    gate = Gate()
    worker = PublishWorker("w", lambda: None, at_end=lambda: done.append("end"))
    worker.submit(gate.pass_through)
    worker.submit(fail)
    worker.submit(lambda: done.append("after"))
    with capture_logs() as lines:
        gate.open()
        with pytest.raises(StreamUnavailableError, match="the store is gone"):
            wait(worker)
    for call in (worker.check, lambda: worker.submit(lambda: None)):
        with pytest.raises(StreamUnavailableError, match="the store is gone"):
            call()
    worker.close(deadline_s=20)
    assert (done, worker.state) == (["end"], WorkerState.FAILED)
    assert [(line["event"], "the store is gone" in line["error"]) for line in lines] == [
        ("publishing has failed", True)
    ]


def test_a_failure_while_idling_is_one_too() -> None:
    def idle() -> float | None:
        raise ValueError("a bug")

    worker = PublishWorker("w", idle)
    worker.submit(lambda: None)
    with pytest.raises(ValueError, match="a bug"):
        wait(worker)


def test_a_wait_beats_and_ends_at_its_deadline_with_what_it_waits_for() -> None:
    gate, beats = Gate(), []
    worker = PublishWorker("w", lambda: None)
    worker.submit(gate.pass_through)
    with pytest.raises(DeadlineError, match="waiting for the last version"):
        worker.wait(lambda: worker.is_free, deadline_s=0.5, what="the last version", heartbeat=lambda: beats.append(0))
    assert beats
    gate.open()
    worker.close(deadline_s=20)


def test_work_that_gets_on_is_waited_for() -> None:
    gate = Gate()
    worker = PublishWorker("w", lambda: None)

    def work() -> None:
        for _ in range(6):
            assert not gate._open.wait(0.4)
            worker.progress()

    worker.submit(work)
    worker.wait(lambda: worker.is_free, deadline_s=2.0, what="six pieces", heartbeat=lambda: None)
    worker.close(deadline_s=20)


def test_a_closed_worker_takes_nothing() -> None:
    worker = PublishWorker("w", lambda: None)
    worker.close(deadline_s=20)
    with pytest.raises(AnabranchError, match="w has been closed"):
        worker.submit(lambda: None)
