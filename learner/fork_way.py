"""Whether an epoch may begin as the fork of a version: only if somebody who has nothing can get there.

Invariant: a version is taken only if the index has a way from nothing to it and nothing of that way, as far as there was time
to read it, is lost or damaged. Otherwise newcomers would be kept out for good: no step is taken without producers, and
no anchor is made without steps. Held by tests/unit/learner/test_fork_way.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import structlog

from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.weight_channel import WeightChannel
from anabranch.transport.weight_intact import first_broken
from anabranch.transport.weight_path import cheapest_path


class _Enough(Exception):
    """No time for more."""


class Way:
    """The cheapest way from nothing to `policy`. `progress` is called after every chunk."""

    def __init__(
        self,
        channel: WeightChannel,
        entries: Sequence[IndexEntry],
        policy: PolicyVersion,
        *,
        threads: int,
        progress: Callable[[], object],
    ) -> None:
        self._channel, self._path, self._policy = channel, cheapest_path(entries, None, policy), policy
        self._threads, self._progress = threads, progress

    def can_be_followed(self, *, time_s: float) -> bool:
        """Read it, which costs no more than writing the anchor that it saves, for up to `time_s`: other ranks wait, and what
        was not reached by then is taken to be intact. Raises StreamUnavailableError."""
        if not self._path:
            return False
        until_s = time.monotonic() + time_s

        def read(size_bytes: int) -> None:
            self._progress()
            if time.monotonic() > until_s:
                raise _Enough

        try:
            broken = first_broken(self._channel, self._path, threads=self._threads, progress=read)
        except _Enough:
            return True
        if broken is not None:
            entry, why = broken
            structlog.get_logger().warning(
                "the channel does not lead to the checkpoint's version any more; an anchor is published",
                version=str(self._policy), broken=f"{entry.label} {entry.policy}", reason=why,
            )  # fmt: skip
        return broken is None
