"""Says that a store takes nothing, long before whoever puts into it gives up; and that it does again.

Invariant: one warning for an outage, when calls have failed for `after_s` and none has succeeded since the first of them
began; one line when the next one succeeds, if the outage was told. Held by tests/unit/transport/test_outage.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import structlog

from anabranch.schemas.errors import BackpressureError, StreamUnavailableError

T = TypeVar("T")

AFTER_S = 5.0


class Outage:
    """Of one store; may be used by several threads at once."""

    def __init__(self, *, after_s: float = AFTER_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._after_s, self._clock = after_s, clock
        self._lock = threading.Lock()
        self._since: float | None = None  # when the first call that failed began
        self._told = False

    def watch(self, call: Callable[[], T]) -> T:
        """`call()`, a put that is repeated by whoever called when it raises StreamUnavailableError or BackpressureError."""
        began = self._clock()
        try:
            result = call()
        except (StreamUnavailableError, BackpressureError) as error:
            self._failed(began, error)
            raise
        if self._since is not None:
            self._succeeded()
        return result

    def _failed(self, began: float, error: Exception) -> None:
        with self._lock:
            self._since = began if self._since is None else min(self._since, began)
            lasted_s = self._clock() - self._since
            tell = not self._told and lasted_s >= self._after_s
            self._told = self._told or tell
        if tell:
            structlog.get_logger().warning(
                "chunks cannot be stored; trying again until the publisher's deadline",
                error=str(error),
                for_s=round(lasted_s, 1),
            )

    def _succeeded(self) -> None:
        with self._lock:
            if self._since is None:
                return
            lasted_s, told = self._clock() - self._since, self._told
            self._since, self._told = None, False
        if told:
            structlog.get_logger().info("chunks can be stored again", after_s=round(lasted_s, 1))
