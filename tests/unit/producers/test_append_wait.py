"""The time for which groups wait for a region: what begins it, what begins it anew, and its end."""

from __future__ import annotations

import pytest

from anabranch.producers.append_wait import AppendWait
from anabranch.schemas.errors import DeadlineError


class Lab:
    def __init__(self) -> None:
        self.now = 7.0
        self.wait = AppendWait("east", "/spool/east/00", deadline_s=50, clock=lambda: self.now)

    def after(self, seconds: float, *, finished: int = 3, taken: int = 1, error: str = "away") -> None:
        self.now += seconds
        self.wait.check(error, finished=finished, taken=taken, waiting=finished - taken)


def test_it_ends_with_what_was_waited_for_and_why() -> None:
    lab = Lab()
    lab.after(1000)
    lab.after(50)
    with pytest.raises(DeadlineError) as caught:
        lab.after(1)
    assert str(caught.value) == (
        "gave up after 51.0 s waiting for region east to take 2 group(s) (spool /spool/east/00); away"
    )


def test_what_moves_begins_it_anew() -> None:
    lab = Lab()
    lab.after(0)
    for number in range(3):
        lab.after(49, finished=4 + number)
    for number in range(3):
        lab.after(49, finished=6, taken=2 + number)
    lab.after(49, finished=6, taken=0)  # a server that has forgotten, and takes them again
    with pytest.raises(DeadlineError):
        lab.after(51, finished=6, taken=0)


def test_without_a_group_or_without_a_fault_nothing_is_waited_for() -> None:
    lab = Lab()
    for _ in range(3):
        lab.after(49)
        lab.after(49, error="")
        lab.after(49)
        lab.after(49, finished=1)
