"""`Permits` in memory: the public twin of `RedisPermits`, with a clock that can be set.

Invariant: that of `permits.py`. One object is shared by all threads that need it.
Held by tests/contract/test_permits.py, the same suite.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from anabranch.transport import permit_rules
from anabranch.transport.permits import Permit, PermitState


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
        self._longest_ms = 0
        self._returned: set[int] = set()
        self._abandoned: set[int] = set()
        self._attempts: dict[int, int] = {}
        self._failures: dict[int, int] = {}

    def take(self, producer: str, *, max_groups: int, lease_ms: int) -> list[Permit]:
        with self._lock:
            if self._epoch is None or max_groups <= 0:
                return []
            limit = permit_rules.raised(self._limit, self._abandoned)
            free = self._expired(max(self._longest_ms, lease_ms)) | self._returned
            again = sorted(index for index in free if index < limit)[:max_groups]
            for index in again:
                self._attempts[index] = self._attempts.get(index, 0) + 1
            self._returned.difference_update(again)
            new = range(self._next, max(self._next, min(limit, self._next + max_groups - len(again))))
            self._next = max(self._next, new.stop)
            for index in [*again, *new]:
                self._leases[index] = _Lease(producer, self._clock_ms() + lease_ms)
                self._longest_ms = max(self._longest_ms, lease_ms)
            return [self._permit(index) for index in [*again, *new]]

    def _expired(self, longest_ms: int) -> set[int]:
        now = self._clock_ms()
        latest = now + permit_rules.LONG * longest_ms  # later: the clock went back
        return {index for index, lease in self._leases.items() if not now < lease.expires_ms <= latest}

    def _permit(self, index: int) -> Permit:
        assert self._epoch is not None
        oldest = permit_rules.min_policy(
            index,
            epoch=self._epoch,
            version=self._version,
            batch=self._batch,
            max_age=self._max_age,
            skipped=sum(abandoned < index for abandoned in self._abandoned),
        )
        return Permit(index, self._attempts.get(index, 0), oldest)

    def renew(self, producer: str, group_indices: Sequence[int], *, lease_ms: int) -> list[int]:
        with self._lock:
            lost = [index for index in group_indices if not self._holds(producer, index)]
            for index in set(group_indices).difference(lost):
                self._leases[index].expires_ms = self._clock_ms() + lease_ms
                self._longest_ms = max(self._longest_ms, lease_ms)
            return lost

    def _holds(self, producer: str, index: int) -> bool:
        lease = self._leases.get(index)
        return lease is not None and lease.producer == producer

    def give_up(self, producer: str, group_indices: Sequence[int], *, max_attempts: int | None) -> list[int]:
        with self._lock:
            for index in group_indices:
                if not self._holds(producer, index):
                    continue
                del self._leases[index]
                if max_attempts is not None:
                    self._failures[index] = self._failures.get(index, 0) + 1
                if max_attempts is not None and self._failures[index] >= max_attempts:
                    self._abandon(index)
                else:
                    self._returned.add(index)
            return [index for index in group_indices if index in self._abandoned]

    def _abandon(self, index: int) -> None:
        self._forget(index)
        self._returned.discard(index)
        self._abandoned.add(index)

    def _forget(self, index: int) -> None:
        """Nobody works on it any more."""
        self._leases.pop(index, None)
        self._attempts.pop(index, None)
        self._failures.pop(index, None)

    def surrender(self, producer: str, *, keep: Collection[int] = ()) -> int:
        with self._lock:
            mine = [index for index, lease in self._leases.items() if lease.producer == producer and index not in keep]
            for index in mine:
                del self._leases[index]
            self._returned.update(mine)
            return len(mine)

    def abandoned(self) -> set[int]:
        with self._lock:
            return set(self._abandoned)

    def state(self) -> PermitState:
        with self._lock:
            expired = self._expired(self._longest_ms)
            return PermitState(
                epoch=self._epoch,
                version=self._version,
                next_index=self._next,
                limit=permit_rules.raised(self._limit, self._abandoned),
                leased=Counter(lease.producer for index, lease in self._leases.items() if index not in expired),
                expired=len(expired),
                returned=len(self._returned),
                abandoned=len(self._abandoned),
            )

    def settle(self, group_indices: Sequence[int]) -> None:
        with self._lock:
            for index in group_indices:
                if self._next <= index < self._limit + len(self._abandoned):
                    self._hand_out_below(index)  # as a hub that has forgotten its last second
                self._forget(index)
                self._returned.discard(index)

    def _hand_out_below(self, index: int) -> None:
        self._returned.update(set(range(self._next, index)) - self._abandoned)
        self._next = max(self._next, index + 1)

    def give_back(self, group_indices: Sequence[int], *, attempts: Mapping[int, int] | None = None) -> None:
        with self._lock:
            for index in group_indices:
                newest = self._attempts.get(index, 0)
                if index in self._leases and newest > (attempts or {}).get(index, newest):
                    continue
                self._leases.pop(index, None)
                if index < self._next and index not in self._abandoned:
                    self._returned.add(index)

    def advance(self, version: int, *, epoch: int | None = None, abandoned: Collection[int] = ()) -> None:
        with self._lock:
            permit_rules.check_open(self._run, asked=epoch, open_epoch=self._epoch)
            for index in sorted(abandoned):
                self._hand_out_below(index)
                self._abandon(index)
            self._version = max(self._version, version)
            self._limit = max(self._limit, self._allowed())

    def reset(
        self,
        *,
        epoch: int,
        version: int,
        batch: int,
        max_age: int,
        total: int,
        accepted: Collection[int],
        abandoned: Collection[int] = (),
    ) -> None:
        with self._lock:
            if self._epoch is not None and self._epoch > epoch:
                raise permit_rules.taken_over(self._run, epoch, self._epoch)
            self._epoch, self._version = epoch, version
            self._batch, self._max_age, self._total = batch, max_age, total
            self._limit = self._allowed()
            accepted = permit_rules.plausible(accepted, self._limit)
            self._next = max(self._next, max([*accepted, *abandoned], default=-1) + 1)
            for index in abandoned:
                self._abandon(index)
            for index in accepted:
                self._forget(index)
            self._returned = set(range(self._next)) - accepted - self._leases.keys() - self._abandoned

    def _allowed(self) -> int:
        return permit_rules.limit(self._version, batch=self._batch, max_age=self._max_age, total=self._total)
