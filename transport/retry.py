"""Waiting with a deadline: exponential backoff with jitter, and an error that names what was waited for.

Invariant: nothing here waits beyond its deadline by more than one attempt, and whoever gives up says what for
(`DeadlineError`). Held by tests/unit/transport/test_retry.py.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from anabranch.schemas.errors import BackpressureError, DeadlineError, StreamUnavailableError

T = TypeVar("T")
Sleep = Callable[[float], object]  # `time.sleep`, or a stop signal's `wait`, which ends early


def sleep_alive(heartbeat: Callable[[], object]) -> Sleep:
    """A sleep for waits of a process under a watchdog: it says before each pause (of a few seconds at most) that it lives."""

    def sleep(seconds: float) -> None:
        heartbeat()
        time.sleep(seconds)

    return sleep


def backoff_s(attempt: int, *, base_s: float = 0.05, cap_s: float = 2.0) -> float:
    """Seconds to wait after failed attempt number `attempt` (from 0): doubling up to `cap_s`, jittered down to half
    so that a fleet does not come back in step."""
    full = cap_s if attempt > 60 else min(cap_s, base_s * 2.0**attempt)
    return full * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not a secret


def retry_until(
    action: Callable[[], T],
    *,
    deadline_s: float,
    what: str,
    hint: str = "",
    retry_on: tuple[type[Exception], ...] = (StreamUnavailableError, BackpressureError),
    base_s: float = 0.05,
    cap_s: float = 2.0,
    sleep: Sleep = time.sleep,
    should_stop: Callable[[], bool] = lambda: False,
) -> T:
    """`action()`, repeated while it raises one of `retry_on`.

    Raises:
        DeadlineError: `deadline_s` passed; names `what`, its cause is the last failure.
        The last failure itself, when `should_stop()` turns true between attempts.
    """
    start = time.monotonic()
    attempt = 0
    while True:
        try:
            return action()
        except retry_on as error:
            left_s = deadline_s - (time.monotonic() - start)
            if should_stop():
                raise
            if left_s <= 0:
                raise DeadlineError.waiting_for(what, deadline_s, hint or str(error)) from error
            sleep(min(left_s, backoff_s(attempt, base_s=base_s, cap_s=cap_s)))
            attempt += 1


def wait_until(
    ready: Callable[[], T | None],
    *,
    deadline_s: float,
    what: str,
    hint: str = "",
    poll_s: float = 0.02,
    sleep: Sleep = time.sleep,
) -> T:
    """Poll `ready` until it returns something true, and return that. Raises DeadlineError naming `what`."""
    end = time.monotonic() + deadline_s
    while True:
        value = ready()
        if value:
            return value
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise DeadlineError.waiting_for(what, deadline_s, hint)
        sleep(min(left_s, poll_s))
