"""Every exit of every supervised process, with its reason: what the supervisor itself remembers only of the latest.

Invariant: a child that ended and waits to be started again is noted once per end, as long as `look` is called more often than
the supervisor's shortest wait. Held by tests/unit/deploy/chaos/test_exits.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from anabranch.deploy.child import Child


@dataclass
class Exits:
    """`noted`: (child, words of the exit) -> how often; `codes`: child -> exit codes in order."""

    noted: Counter[tuple[str, str]] = field(default_factory=Counter)
    codes: dict[str, list[int]] = field(default_factory=dict)
    _last: dict[str, tuple[int, bool]] = field(default_factory=dict)

    def look(self, children: Sequence[Child]) -> None:
        for child in children:
            name, now = child.spec.name, (child.restarts, child.alive)
            was = self._last.get(name, (-1, True))
            self._last[name] = now
            if child.alive or child.exit_code is None or was == now:
                continue
            self.noted[name, child.last_exit] += 1
            self.codes.setdefault(name, []).append(child.exit_code)
