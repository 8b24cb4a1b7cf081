"""Remembers which manifests were found broken, so that the next attempts do not begin with them again.

Invariant: a broken manifest is left out for a pause that doubles with every time that it is found broken; then it may be
tried once more. What may be mended on the store is tried again in less than a minute, for ever. Chunks that are as they are
named and still do not make their version stay so: those pauses grow longer. What was not met for long is forgotten. Held by
tests/unit/producers/test_broken_manifests.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from anabranch.transport.retry import backoff_s
from anabranch.transport.weight_channel import Named

PAUSE_FIRST_S = 0.2
MENDABLE_LAST_S = 40.0  # and the pause between two attempts on top
UNFIT_LAST_S = 600.0


@dataclass(slots=True)
class _Broken:
    error: Exception
    times: int
    until_s: float


class BrokenManifests:
    """Of one process and thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[Named, _Broken] = {}

    def now(self) -> dict[Named, Exception]:
        """Those to be left out now, each with the reason."""
        now_s = self._clock()
        for name in [n for n, b in self._known.items() if b.until_s + UNFIT_LAST_S < now_s]:
            del self._known[name]
        return {name: b.error for name, b in self._known.items() if b.until_s > now_s}

    def knows_all(self, names: Iterable[Named]) -> bool:
        return self._known.keys() >= set(names)

    def add(self, broken: Mapping[Named, Exception], *, unfit: bool = False) -> None:
        """Found broken just now. `unfit`: their chunks are what they should be."""
        cap_s = UNFIT_LAST_S if unfit else MENDABLE_LAST_S
        for name, error in broken.items():
            times = self._known[name].times + 1 if name in self._known else 1
            pause_s = backoff_s(times - 1, base_s=PAUSE_FIRST_S, cap_s=cap_s)
            self._known[name] = _Broken(error, times, self._clock() + pause_s)

    def clear(self) -> None:
        self._known.clear()
