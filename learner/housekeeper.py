"""Keeps the channel within its budget of bytes, from a thread and a connection of its own.

Invariant: publishing never waits for it, and it never ends the learner: what fails is logged and tried again. What may go
is decided by transport/weight_retention.py. It takes a pass over the whole index, so at the budget it makes room for many
versions at once. Held by tests/unit/learner/test_housekeeper.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.weight_channel import WeightChannel
from anabranch.transport.weight_retention import MANIFEST_BYTES, retain
from anabranch.transport.wiring import Hub

COLLECT_EVERY_S = 60.0
SPARE = 1 / 8  # of the budget, which is freed when it is used up
AGAIN_AFTER_S = 5.0  # of a failure, and when leases keep the channel above its budget


class Housekeeper:
    """Args:
    on_dropped: called in its thread with what has gone from the channel.
    """

    def __init__(
        self,
        connect: Callable[[], Hub],
        retain_bytes: int,
        *,
        on_dropped: Callable[[Sequence[IndexEntry]], object] = lambda entries: None,
    ) -> None:
        self._connect, self._retain_bytes, self._on_dropped = connect, retain_bytes, on_dropped
        self._lock = threading.Lock()
        self._bytes = retain_bytes + 1  # not known yet: look first
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._looked_s = self._collected_s = -COLLECT_EVERY_S
        self._busy = False
        self._told: tuple[Any, ...] = ()
        self._thread = threading.Thread(target=self._run, name="weight retention", daemon=True)
        self._thread.start()

    def committed(self, payload_bytes: int) -> None:
        """The channel has grown by a manifest."""
        with self._lock:
            self._bytes += payload_bytes + MANIFEST_BYTES
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
            except Exception as error:  # noqa: BLE001 - the learner goes on, and the channel must not grow without end
                structlog.get_logger().warning("the weight channel was not tidied up; trying again", error=str(error))
                self._wake.set()
                self._stopping.wait(AGAIN_AFTER_S)
            self._busy = False
        if hub is not None:
            hub.close()

    def _tidy(self, channel: WeightChannel) -> None:
        if self._bytes > self._retain_bytes and not self._stopping.wait(max(0.0, self._looked_s - time.monotonic())):
            with self._lock:
                seen = self._bytes
            done = retain(channel, self._retain_bytes, spare=SPARE)
            with self._lock:  # what was committed meanwhile may count twice, until the next look
                self._bytes += done.bytes_after - seen
            if done.dropped:
                self._on_dropped(done.dropped)
            self._tell(done.bytes_after, tuple(lease.holder for lease in done.held_by))
            # With little or nothing to drop: look again now and then, not at every version.
            is_tight = done.bytes_after > self._retain_bytes * (1 - SPARE / 2)
            self._looked_s = time.monotonic() + (AGAIN_AFTER_S if is_tight else 0.0)
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
