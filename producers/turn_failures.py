"""What a failed attempt to advance a node's mirror leaves in its control page: why it failed, and when the next one may be.

Invariant: a pause after a failure is the node's, whoever has the turn next; it doubles up to `RETRY_LAST_S` and is gone with
the first success. After weights that could not be fetched whoever failed tries again first, since it has kept what is good
of them; every `ROTATE`-th time the others come first, in case the fault is its own. Who comes second comes `TAKEOVER_S` later, so that
a process that died, or is stopped, holds nobody up. The text is for people: nothing is decided by it. Held by
tests/unit/producers/test_turn_failures.py.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable

from anabranch.producers.mirror_memory import MirrorMemory
from anabranch.schemas.errors import StreamUnavailableError, WireError
from anabranch.transport.retry import backoff_s

RETRY_FIRST_S = 0.2
RETRY_LAST_S = 5.0
TAKEOVER_S = 2.0
ROTATE = 4


class Order(enum.IntEnum):
    ANYONE = 0
    OWNER_FIRST = 1
    OTHERS_FIRST = 2


class TurnFailures:
    """One process's view. `clock`: the same for all processes of the node, in seconds."""

    def __init__(self, memory: MirrorMemory, clock: Callable[[], float] = time.monotonic) -> None:
        self._header, self._clock = memory.header, clock
        self._mine = 0  # number of the last failure that this one wrote

    def failed(self, error: Exception) -> None:
        """With the turn."""
        row = self._header["failure"][0]
        seq = self._header["now"]["seq"][0]
        times = int(row["times"]) + 1 if row["seq"] == seq else 1
        self._mine = int(row["number"]) + 1
        order = Order.ANYONE
        if isinstance(error, (WireError, StreamUnavailableError)):
            order = Order.OWNER_FIRST if times % ROTATE else Order.OTHERS_FIRST
        row["number"], row["process"], row["seq"], row["order"] = self._mine, os.getpid(), seq, order
        row["not_before_s"] = self._clock() + backoff_s(times - 1, base_s=RETRY_FIRST_S, cap_s=RETRY_LAST_S)
        row["text"] = str(error).encode(errors="replace")
        row["times"] = times

    def worked(self) -> None:
        """With the turn."""
        self._header["failure"][0]["times"] = 0

    def pause_s(self) -> float:
        """Seconds before this process may try, 0 if it may now."""
        row = self._header["failure"][0]
        if not row["times"]:
            return 0.0
        left_s = float(row["not_before_s"]) - self._clock()
        second = Order.OTHERS_FIRST if self.is_mine else Order.OWNER_FIRST
        if row["order"] == second:
            left_s += TAKEOVER_S
        return left_s if 0 < left_s <= RETRY_LAST_S + TAKEOVER_S else 0.0  # more: written by another clock

    @property
    def is_mine(self) -> bool:
        """Was the last failed attempt this process's?"""
        return self._mine > 0 and int(self._header["failure"]["number"][0]) == self._mine

    def reason(self) -> str:
        """Why the last attempt failed, and whose it was; "" if it did not."""
        row = self._header["failure"][0]
        if not row["times"]:
            return ""
        return f"process {int(row['process'])}: {row['text'].decode(errors='ignore')}"
