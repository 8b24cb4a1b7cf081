"""How long finished groups have waited for a region that takes nothing, while nothing else moved either.

Invariant: a producer that finishes groups, or whose region takes some, waits for nothing: each of both begins the time anew. While
neither happens, although groups wait, it is at most `deadline_s` until a DeadlineError. What is in the spool stays there.
Held by tests/unit/producers/test_append_wait.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from anabranch.schemas.errors import DeadlineError


class AppendWait:
    """`region` and `folder`: for messages."""

    def __init__(
        self, region: str, folder: object, *, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._region, self._folder, self._deadline_s, self._clock = region, folder, deadline_s, clock
        self._mark: tuple[int, int] | None = None  # None: nothing is waited for
        self._since_s = 0.0

    def check(self, error: str, *, finished: int, taken: int, waiting: int) -> None:
        """As it is at this moment. `error`: why the region takes nothing, "" if it does. `finished`, `taken`: how many groups
        of this producer there are, and how many of them the region has; `waiting`: how many it lacks.

        Raises DeadlineError: `waiting` groups, none finished and none taken for `deadline_s`.
        """
        if not error or not waiting:
            self._mark = None
            return
        now, mark = self._clock(), (finished, taken)
        if mark != self._mark:
            self._mark, self._since_s = mark, now
        if now - self._since_s > self._deadline_s:
            what = f"region {self._region} to take {waiting} group(s) (spool {self._folder})"
            raise DeadlineError.waiting_for(what, now - self._since_s, error)
