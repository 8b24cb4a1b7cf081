"""The alarm of a spool without room: said, said again, ended, and bounded in time."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from anabranch.producers.spool_room import Room, RoomAlarm
from anabranch.schemas.errors import DeadlineError


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def test_it_is_said_when_it_begins_every_minute_and_when_it_ends() -> None:
    clock = Clock()
    alarm = RoomAlarm("/spool/east/00", deadline_s=1000, clock=clock)
    with capture_logs() as logs:
        alarm.is_now(Room.OPEN, about={})
        for _ in range(150):
            alarm.is_now(Room.FULL, "the spool is full", about={"to_append": 7})
            clock.now += 1
        alarm.is_now(Room.OPEN, about={})
        alarm.is_now(Room.OPEN, about={})
    said = [(line["log_level"], line["for_s"] if "for_s" in line else line["after_s"]) for line in logs]
    assert said == [("error", 0.0), ("error", 60.0), ("error", 120.0), ("info", 150.0)]
    assert (logs[0]["spool"], logs[0]["to_append"], logs[0]["state"]) == ("/spool/east/00", 7, "full")
    assert logs[0]["event"] == "no further group is started: the spool is full"


def test_a_spool_that_fills_and_empties_all_the_time_does_not_fill_the_log() -> None:
    clock = Clock()
    alarm = RoomAlarm("/spool", deadline_s=50, clock=clock)
    with capture_logs() as logs:
        for _ in range(90):
            alarm.is_now(Room.FULL, "full", about={})
            clock.now += 1
            alarm.is_now(Room.OPEN, about={})
            clock.now += 1
            alarm.check()
    assert [line["log_level"] for line in logs] == ["error", "info"] * 3


def test_another_reason_is_said_at_once_and_the_time_goes_on() -> None:
    clock = Clock()
    alarm = RoomAlarm("/spool", deadline_s=50, clock=clock)
    alarm.is_now(Room.FULL, "full", about={})
    clock.now += 30
    with capture_logs() as logs:
        alarm.is_now(Room.DISK, "no space left", about={})
    assert [(line["log_level"], line["for_s"]) for line in logs] == [("error", 30.0)]
    assert (alarm.error, alarm.waiting_for) == ("no space left", "the disk to take the spool's writes (/spool)")
    alarm.check()
    clock.now += 21
    with pytest.raises(DeadlineError, match=r"gave up after 51.0 s waiting for the disk .* \(/spool\); no space left"):
        alarm.check()
    alarm.is_now(Room.OPEN, about={})
    alarm.check()
    assert (alarm.error, alarm.waiting_for) == ("", "")
    alarm.is_now(Room.FULL, "full", about={})
    clock.now += 49
    alarm.check()
