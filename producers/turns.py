"""A thread that takes turns at one thing until it is told to stop.

Invariant: what a turn raises ends the thread and is kept in `failure`, for its owner to raise; `stop` ends it between two
turns. A turn that hangs is left behind (the thread is a daemon) and `stop` says so.
Held by tests/unit/producers/test_turns.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SHORTEST_S = 0.001  # between two turns, so that a turn that says "at once" for ever leaves the other threads some time


class Turns:
    """Calls `turn` again and again; it returns after how many seconds it wants to be called, at the latest."""

    def __init__(self, name: str, turn: Callable[[], float]) -> None:
        self._turn = turn
        self._change = threading.Condition()
        self._woken = self._stopping = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """The next turn comes now."""
        with self._change:
            self._woken = True
            self._change.notify_all()

    def stop(self, *, wait_s: float) -> bool:
        """No further turn begins; waits up to `wait_s` for the one under way and returns whether it has ended."""
        with self._change:
            self._stopping = True
            self._change.notify_all()
        if self._thread.is_alive():
            self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping:
                wait_s = self._turn()
                with self._change:
                    self._change.wait_for(lambda: self._woken or self._stopping, max(wait_s, SHORTEST_S))
                    self._woken = False
        except BaseException as error:  # noqa: BLE001 - kept for the owner, who raises it
            if not self._stopping:
                self.failure = error


def wait_while(condition: Callable[[], bool], *, deadline_s: float, poll_s: float = 0.01) -> None:
    """Return when `condition()` is false or the time is up."""
    end = time.monotonic() + deadline_s
    while condition() and time.monotonic() < end:
        time.sleep(poll_s)
