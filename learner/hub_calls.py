"""Calls to the hub's Redis that are repeated until it answers.

Invariant: a call ends with its result or, after the deadline, with an error that says what it was for; meanwhile the heart beats.
Held by tests/unit/learner/test_loop.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from anabranch.transport.retry import retry_until, sleep_alive

T = TypeVar("T")


class HubCalls:
    def __init__(self, *, deadline_s: float, heartbeat: Callable[[], object]) -> None:
        self._deadline_s, self._sleep = deadline_s, sleep_alive(heartbeat)

    def __call__(self, call: Callable[[], T], why: str) -> T:
        """Raises DeadlineError: the hub did not answer. `why`: what for, "to open permits"."""
        return retry_until(call, deadline_s=self._deadline_s, what=f"the hub's Redis, {why}", sleep=self._sleep)
