"""`Permits` in memory: the public twin of `RedisPermits`, with a clock that can be set.

Invariant: that of `permits.py`. One object is shared by all threads that need it.
Held by tests/contract/test_permits.py, the same suite.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from anabranch.transport import permit_rules
from anabranch.transport.permits import Permit


@dataclass(slots=True)
class _Lease:
    producer: str
    expires_ms: float


class MemoryPermits:
    """`clock_ms` gives milliseconds."""

    def __init__(self, run: str = "run", *, clock_ms: Callable[[], float] = lambda: time.monotonic() * 1000) -> None:
        self._run = run
        self._clock_ms = clock_ms
        self._lock = threading.RLock()
        self._epoch: int | None = None  # None: no learner has opened the run
        self._version = self._limit = self._next = 0
        self._batch, self._max_age, self._total = 1, 0, 0
        self._leases: dict[int, _Lease] = {}
        self._returned: set[int] = set()
        self._attempts: dict[int, int] = {}

    def take(self, producer: str, *, max_groups: int, lease_ms: int) -> list[Permit]:
        with self._lock:
            if self._epoch is None or max_groups <= 0:
                return []
            now = self._clock_ms()
            expired = {index for index, lease in self._leases.items() if lease.expires_ms <= now}
            again = sorted(index for index in expired | self._returned if index < self._limit)[:max_groups]
            for index in again:
                self._attempts[index] = self._attempts.get(index, 0) + 1
            self._returned.difference_update(again)
            new = range(self._next, max(self._next, min(self._limit, self._next + max_groups - len(again))))
            self._next = max(self._next, new.stop)
            for index in [*again, *new]:
                self._leases[index] = _Lease(producer, now + lease_ms)
            return [self._permit(index) for index in [*again, *new]]

    def _permit(self, index: int) -> Permit:
        assert self._epoch is not None
        oldest = permit_rules.min_policy(
            index, epoch=self._epoch, version=self._version, batch=self._batch, max_age=self._max_age
        )
        return Permit(index, self._attempts.get(index, 0), oldest)

    def renew(self, producer: str, group_indices: Sequence[int], *, lease_ms: int) -> list[int]:
        with self._lock:
            lost: list[int] = []
            for index in group_indices:
                lease = self._leases.get(index)
                if lease is not None and lease.producer == producer:
                    lease.expires_ms = self._clock_ms() + lease_ms
                else:
                    lost.append(index)
            return lost

    def settle(self, group_indices: Sequence[int]) -> None:
        with self._lock:
            for index in group_indices:
                self._leases.pop(index, None)
                self._returned.discard(index)

    def give_back(self, group_indices: Sequence[int]) -> None:
        with self._lock:
            for index in group_indices:
                self._leases.pop(index, None)
                if index < self._next:
                    self._returned.add(index)

    def advance(self, version: int, *, epoch: int | None = None) -> None:
        """Raises TemporaryError when no epoch is open, ConfigError when a newer one is."""
        with self._lock:
            if self._epoch is None:
                raise permit_rules.not_open(self._run)
            if epoch is not None and self._epoch > epoch:
                raise permit_rules.taken_over(self._run, epoch, self._epoch)
            self._version = max(self._version, version)
            self._limit = max(self._limit, self._allowed())

    def reset(
        self, *, epoch: int, version: int, batch: int, max_age: int, total: int, accepted: Collection[int]
    ) -> None:
        """Raises ConfigError when a newer epoch is open."""
        with self._lock:
            if self._epoch is not None and self._epoch > epoch:
                raise permit_rules.taken_over(self._run, epoch, self._epoch)
            self._epoch, self._version = epoch, version
            self._batch, self._max_age, self._total = batch, max_age, total
            self._limit = self._allowed()
            self._next = max(self._next, max(accepted, default=-1) + 1)
            taken = set(accepted)
            for index in taken & self._leases.keys():
                del self._leases[index]
            self._returned = set(range(self._next)) - taken - self._leases.keys()

    def _allowed(self) -> int:
        return permit_rules.limit(self._version, batch=self._batch, max_age=self._max_age, total=self._total)
