"""When a spool may let go of a group: not before what the server says of it can no longer be forgotten.

Invariant: `read` never returns a number above any reading of the last `release_after_s`, and 0 until a reading at least that
old stands at their beginning with no interruption since. Held by tests/unit/producers/test_release_rule.py.
"""

from __future__ import annotations

from collections import deque


class ReleaseRule:
    def __init__(self, release_after_s: float) -> None:
        self._after_s = release_after_s
        self._readings: deque[tuple[float, int]] = deque()

    def read(self, now_s: float, settled_below: int) -> int:
        """Take in that at `now_s` all numbers below `settled_below` were settled; returns below which they may go."""
        self._readings.append((now_s, settled_below))
        old_enough = now_s - self._after_s
        while len(self._readings) > 1 and self._readings[1][0] <= old_enough:
            self._readings.popleft()
        if self._readings[0][0] > old_enough:
            return 0
        return min(below for _, below in self._readings)

    def interrupt(self) -> None:
        """The server could not be asked: it may have started anew, and what it said before counts no more."""
        self._readings.clear()
