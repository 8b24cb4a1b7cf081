"""A thread of turns: woken, stopped, and its failure kept."""

from __future__ import annotations

import threading

import pytest

from anabranch.producers.turns import Turns


def test_it_is_woken_out_of_a_long_wait_and_stopped() -> None:
    turned = threading.Semaphore(0)
    turns = Turns("t", lambda: turned.release() or 3600.0)
    turns.start()
    for _ in range(3):
        assert turned.acquire(timeout=10)
        turns.wake()
    assert turned.acquire(timeout=10)
    assert turns.stop(wait_s=10)
    assert turns.failure is None


def test_a_wake_during_a_turn_is_not_lost() -> None:
    inside, go_on, turned = threading.Event(), threading.Event(), threading.Semaphore(0)

    def turn() -> float:
        inside.set()
        go_on.wait(10)
        turned.release()
        return 3600.0

    turns = Turns("t", turn)
    turns.start()
    assert inside.wait(10)
    turns.wake()
    go_on.set()
    assert turned.acquire(timeout=10)
    assert turned.acquire(timeout=10)
    turns.stop(wait_s=10)


def test_what_a_turn_raises_is_kept() -> None:
    turns = Turns("t", lambda: (_ for _ in ()).throw(ValueError("no")))
    turns.start()
    assert turns.stop(wait_s=10)
    with pytest.raises(ValueError, match="no"):
        raise turns.failure or AssertionError


def test_a_turn_that_hangs_is_left_behind_and_its_end_does_not_count_as_a_failure() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def turn() -> float:
        inside.set()
        go_on.wait(30)
        raise OSError("closed under me")

    turns = Turns("t", turn)
    turns.start()
    assert inside.wait(10)
    assert not turns.stop(wait_s=0.01)
    go_on.set()
    assert turns.stop(wait_s=10)
    assert turns.failure is None
