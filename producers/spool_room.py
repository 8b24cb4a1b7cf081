"""Whether a spool takes another group, and the alarm when it does not.

Invariant: while a spool is full, or the disk under it takes no writes, that is said in the log as an error when it begins and
every `REPEAT_S` from then on, and once more when it has ended (of a spool that fills and empties all the time no more often
than that); after `deadline_s` it is a DeadlineError.
Held by tests/unit/producers/test_spool_room.py.

    OPEN  another group may be started
    FULL  the groups in flight fit, and no others: the learner must settle some first (spool.max_bytes)
    DISK  the disk refuses to write; what should be written waits in memory
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping

import structlog

from anabranch.schemas.errors import DeadlineError

REPEAT_S = 60.0


class Room(enum.Enum):
    OPEN = "open"
    FULL = "full"
    DISK = "disk"


class RoomAlarm:
    """`folder`: where the spool is, for messages."""

    def __init__(self, folder: object, *, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._deadline_s, self._clock = folder, deadline_s, clock
        self._since_s = 0.0
        self._said_s: dict[Room, float] = {}
        self._said = False  # of the present lack of room
        self.room, self.error = Room.OPEN, ""
        self._log = structlog.get_logger()

    def is_now(self, room: Room, why: str = "", *, about: Mapping[str, object]) -> None:
        """The spool's room as it is at this moment; `about` stands in the log line."""
        now = self._clock()
        if room is Room.OPEN:
            if self._said:
                self._log.info("the spool takes groups again", after_s=round(now - self._since_s, 1), **about)
            self.room, self.error, self._said = room, "", False
            return
        if self.room is Room.OPEN:
            self._since_s = now
        if now - self._said_s.get(room, float("-inf")) >= REPEAT_S:
            self._said_s[room], self._said = now, True
            self._log.error(
                "no further group is started: " + why,
                spool=str(self._folder), state=room.value, for_s=round(now - self._since_s, 1), **about,
            )  # fmt: skip
        self.room, self.error = room, why

    @property
    def waiting_for(self) -> str:
        """For the status line; "" while there is room."""
        what = {Room.OPEN: "", Room.FULL: "room in the spool", Room.DISK: "the disk to take the spool's writes"}
        return what[self.room] and f"{what[self.room]} ({self._folder})"

    def check(self) -> None:
        """Raises DeadlineError: there has been no room for `deadline_s`."""
        waited_s = self._clock() - self._since_s
        if self.room is not Room.OPEN and waited_s > self._deadline_s:
            raise DeadlineError.waiting_for(self.waiting_for, waited_s, self.error)
