"""Finished groups on their way to the region's stream.

Invariant: a group leaves the outbox only when the stream has stored it; sequence numbers ascend and a repeated
append stores once, so retrying after a lost answer is safe. An unreachable or full Redis is retried with growing
pauses until `deadline_s`, then the process gives up with DeadlineError (exit 75) and the groups' permits expire.
A group that no entry can hold ends the process with ConfigError (exit 78): whoever samples it next would fail likewise.
Held by tests/unit/producers/test_outbox.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import structlog

from anabranch.schemas.envelope import Envelope
from anabranch.schemas.errors import (
    BackpressureError,
    ConfigError,
    DeadlineError,
    EnvelopeError,
    StreamUnavailableError,
)
from anabranch.schemas.trajectory import Group, encode_group
from anabranch.transport.stream import TrajectoryStream

RETRY_FIRST_S = 0.1
RETRY_LAST_S = 5.0


class Outbox:
    def __init__(
        self,
        stream: TrajectoryStream,
        producer: str,
        *,
        region: str,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._producer, self._region = stream, producer, region
        self._deadline_s, self._clock = deadline_s, clock
        self._waiting: deque[Envelope] = deque()
        self._seq = 0
        self._failing_since: float | None = None
        self._retry_at = 0.0
        self._pause_s = RETRY_FIRST_S
        self.error = ""
        self._log = structlog.get_logger()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, group: Group) -> None:
        """Raises TrajectoryError if `group` is not well formed (a non-finite reward or log-prob)."""
        payload = encode_group(group)
        self._seq += 1
        self._waiting.append(Envelope(self._producer, self._seq, group.group_index, payload))

    def flush(self) -> list[int]:
        """Append what waits, if it is time to try; never blocks beyond one attempt. Returns the group indices that are
        stored now.

        Raises:
            DeadlineError: the stream has been failing for `deadline_s`.
            ConfigError: a group is larger than an entry may be.
        """
        stored: list[int] = []
        while self._waiting and self._clock() >= self._retry_at:
            try:
                self._stream.append(self._waiting[0])
            except (StreamUnavailableError, BackpressureError) as error:
                self._failed(error)
                break
            except EnvelopeError as error:
                raise ConfigError(
                    f"group {self._waiting[0].group_index} does not fit an entry: {error}; lower sampling.group_size or "
                    "sampling.max_tokens, or raise stream.max_entry_bytes"
                ) from error
            stored.append(self._waiting.popleft().group_index)
            if self._failing_since is not None:
                self._log.info("region stream is back", region=self._region, groups_waiting=len(self._waiting))
            self._failing_since, self._pause_s, self.error = None, RETRY_FIRST_S, ""
        return stored

    def _failed(self, error: Exception) -> None:
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
            self._log.warning("cannot append; groups wait", region=self._region, error=str(error))
        self.error = str(error)
        waited = now - self._failing_since
        if waited > self._deadline_s:
            raise DeadlineError.waiting_for(
                f"the trajectory stream of region {self._region} with {len(self._waiting)} groups to append",
                waited,
                str(error),
            ) from error
        self._retry_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, RETRY_LAST_S)
