"""The boards of `boards.py` in memory: public twins, to be shared by threads. Held by tests/contract/test_boards.py."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from anabranch.schemas.metrics import LearnerStatus, ProducerStatus
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.boards import STALE_AFTER_MS, VERIFY_WITHIN_MS

ClockMs = Callable[[], float]


def wall_ms() -> float:
    return time.time() * 1000


class MemoryRunBoard:
    def __init__(self, *, clock_ms: ClockMs = wall_ms) -> None:
        self._clock_ms = clock_ms
        self._lock = threading.RLock()
        self._finished: str | None = None
        self._learner: LearnerStatus | None = None
        self._producers: dict[str, tuple[float, ProducerStatus]] = {}
        self._verification = ("", 0.0)  # token, when its time is over

    def start(self) -> None:
        with self._lock:
            self._finished = None

    def finish(self, reason: str) -> None:
        with self._lock:
            if self._finished is None:
                self._finished = reason

    def finished(self) -> str | None:
        return self._finished

    def report_learner(self, status: LearnerStatus) -> None:
        self._learner = status

    def learner(self) -> LearnerStatus | None:
        return self._learner

    def report_producer(self, producer: str, status: ProducerStatus) -> None:
        with self._lock:
            self._producers[producer] = (self._clock_ms(), status)

    def producers(self, *, within_ms: int = STALE_AFTER_MS) -> dict[str, ProducerStatus]:
        with self._lock:
            since = self._clock_ms() - within_ms
            return {name: status for name, (at, status) in self._producers.items() if at >= since}

    def drop_stale_producers(self, *, older_ms: int = STALE_AFTER_MS) -> list[str]:
        with self._lock:
            since = self._clock_ms() - older_ms
            gone = sorted(name for name, (at, _) in self._producers.items() if at < since)
            for name in gone:
                del self._producers[name]
            return gone

    def request_verification(self, *, ttl_ms: int = VERIFY_WITHIN_MS) -> str:
        token = secrets.token_hex(8)
        self._verification = token, self._clock_ms() + ttl_ms
        return token

    def verification_wanted(self) -> str | None:
        token, until_ms = self._verification
        return token if token and self._clock_ms() < until_ms else None


@dataclass(slots=True)
class _Shard:
    expires_ms: float
    producer: str = ""
    result: str | None = None  # JSON


class MemoryEvaluationBoard:
    def __init__(self, *, clock_ms: ClockMs = wall_ms) -> None:
        self._clock_ms = clock_ms
        self._lock = threading.RLock()
        self._wanted: tuple[PolicyVersion, int] | None = None
        self._shards: dict[tuple[PolicyVersion, int], _Shard] = {}

    def request(self, policy: PolicyVersion, shards: int) -> None:
        with self._lock:
            self._wanted = (policy, shards)

    def wanted(self) -> tuple[PolicyVersion, int] | None:
        return self._wanted

    def take(self, producer: str, policy: PolicyVersion, lease_ms: int) -> int | None:
        with self._lock:
            if self._wanted is None or self._wanted[0] != policy:
                return None
            now = self._clock_ms()
            for number in range(self._wanted[1]):
                shard = self._shards.get((policy, number))
                if shard is None or (shard.result is None and not now < shard.expires_ms <= now + 2 * lease_ms):
                    self._shards[policy, number] = _Shard(now + lease_ms, producer)
                    return number
            return None

    def renew(self, producer: str, policy: PolicyVersion, shard: int, lease_ms: int) -> bool:
        with self._lock:
            held = self._shards.get((policy, shard))
            if held is None or held.result is not None or held.producer != producer:
                return False
            held.expires_ms = self._clock_ms() + lease_ms
            return True

    def post(self, policy: PolicyVersion, shard: int, result: Mapping[str, Any]) -> bool:
        with self._lock:
            if self._wanted is None or self._wanted[0] != policy or not 0 <= shard < self._wanted[1]:
                return False
            kept = self._shards.setdefault((policy, shard), _Shard(0.0))
            if kept.result is not None:
                return False
            kept.result = json.dumps(dict(result))
            return True

    def results(self, policy: PolicyVersion) -> dict[int, dict[str, Any]]:
        with self._lock:
            return {
                number: json.loads(shard.result)
                for (of, number), shard in sorted(self._shards.items(), key=lambda item: item[0])
                if of == policy and shard.result is not None
            }

    def clear(self) -> None:
        with self._lock:
            if self._wanted is not None:
                policy = self._wanted[0]
                self._shards = {key: shard for key, shard in self._shards.items() if key[0] != policy}
                self._wanted = None
