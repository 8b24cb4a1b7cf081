"""Keeps the channel within its budget of bytes, from a thread and a connection of its own.

Invariant: publishing never waits for it, and it never ends the learner: what fails is logged and tried again. What may go
is decided by transport/weight_retention.py. Held by tests/unit/learner/test_weight_publisher.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import structlog

from anabranch.schemas.errors import AnabranchError
from anabranch.transport.weight_channel import WeightChannel
from anabranch.transport.weight_retention import retain
from anabranch.transport.wiring import Hub

COLLECT_EVERY_S = 60.0
AGAIN_AFTER_S = 5.0  # of a failure, and when leases keep the channel above its budget


class Housekeeper:
    def __init__(self, connect: Callable[[], Hub], retain_bytes: int) -> None:
        self._connect, self._retain_bytes = connect, retain_bytes
        self._lock = threading.Lock()
        self._bytes = retain_bytes + 1  # not known yet: look first
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._looked_s = self._collected_s = -COLLECT_EVERY_S
        self._busy = False
        self._told: tuple[Any, ...] = ()
        self._thread = threading.Thread(target=self._run, name="weight retention", daemon=True)
        self._thread.start()

    def committed(self, size_bytes: int) -> None:
        """The channel has grown."""
        with self._lock:
            self._bytes += size_bytes
        if self._bytes > self._retain_bytes:
            self._wake.set()

    @property
    def is_quiet(self) -> bool:
        """It has looked at all that was committed."""
        return not (self._wake.is_set() or self._busy)

    def close(self, *, deadline_s: float) -> None:
        self._stopping.set()
        self._wake.set()
        self._thread.join(deadline_s)

    def _run(self) -> None:
        hub: Hub | None = None
        self._wake.set()
        while not self._stopping.is_set():
            self._wake.wait(COLLECT_EVERY_S)
            self._busy = True
            self._wake.clear()
            try:
                if not self._stopping.is_set():
                    hub = hub or self._connect()
                    self._tidy(hub.channel)
            except AnabranchError as error:
                structlog.get_logger().warning("the weight channel was not tidied up; trying again", error=str(error))
                self._wake.set()
                self._stopping.wait(AGAIN_AFTER_S)
            self._busy = False
        if hub is not None:
            hub.close()

    def _tidy(self, channel: WeightChannel) -> None:
        if self._bytes > self._retain_bytes and not self._stopping.wait(max(0.0, self._looked_s - time.monotonic())):
            with self._lock:
                self._bytes = 0
            done = retain(channel, self._retain_bytes)
            with self._lock:
                self._bytes += done.bytes_after
            self._tell(done.bytes_after, tuple(lease.holder for lease in done.held_by))
            # Above the budget with nothing to drop: look again now and then, not at every version.
            self._looked_s = time.monotonic() + (AGAIN_AFTER_S if done.bytes_after > self._retain_bytes else 0.0)
        if time.monotonic() - self._collected_s >= COLLECT_EVERY_S:
            self._collected_s = time.monotonic()
            channel.collect_garbage()

    def _tell(self, size_bytes: int, holders: tuple[str, ...]) -> None:
        if holders and holders != self._told:
            structlog.get_logger().warning(
                "the weight channel is above channel.retain_bytes: followers may still need it",
                bytes=size_bytes,
                retain_bytes=self._retain_bytes,
                held_by=", ".join(holders[:8]),
            )
        self._told = holders
