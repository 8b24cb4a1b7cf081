"""How long each process said that it waits for one and the same thing, without getting anywhere.

Invariant: a wait begins when a status with this `waiting_for` is first seen and ends when it says something else, when the
process has moved on (a step, a group) or was started anew; numbers in the text do not make it another wait. A status that
nobody refreshes (its process is dead or frozen: the watchdog's business) makes no wait longer.
Held by tests/unit/deploy/chaos/test_waits.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_NUMBERS = re.compile(r"\d[\d.,e+-]*")
_FOLDERS = re.compile(r"(?<![\w/])/\S*/(?=disks/)")  # where the run lies says nothing, and a report is for everybody


@dataclass(frozen=True, slots=True)
class Wait:
    who: str  # "learner" or a producer's region
    what: str
    seconds: float


@dataclass
class Waits:
    longest: dict[tuple[str, str], float] = field(default_factory=dict)  # (who, what) -> seconds
    _said: dict[str, Any] = field(default_factory=dict)  # name -> time that the latest status carries
    _since: dict[str, tuple[tuple[Any, ...], float]] = field(default_factory=dict)

    def saw(self, name: str, status: Mapping[str, Any], now: float) -> None:
        """A status as it stands on the hub at `now` (monotonic seconds)."""
        who = str(status.get("region") or name)
        what = _FOLDERS.sub("", str(status.get("waiting_for") or "").partition(";")[0])  # the rest is advice
        what = _NUMBERS.sub("N", what).strip()
        progress = (status.get("step"), status.get("epoch"), status.get("groups_done"), status.get("pid"))
        mark = (what, progress)
        said, self._said[name] = self._said.get(name), status.get("updated_ms")
        held = self._since.get(name)
        if held is None or held[0] != mark:
            self._since[name] = (mark, now)
            return
        if what and said != status.get("updated_ms"):
            key = (who, what)
            self.longest[key] = max(self.longest.get(key, 0.0), now - held[1])

    def add(self, wait: Wait) -> None:
        """One that was seen in another way."""
        key = (wait.who, wait.what)
        self.longest[key] = max(self.longest.get(key, 0.0), wait.seconds)

    def worst(self) -> list[Wait]:
        """Longest first."""
        return sorted((Wait(who, what, s) for (who, what), s in self.longest.items()), key=lambda w: -w.seconds)
