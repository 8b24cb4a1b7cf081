"""The boards of `boards.py` on the hub's Redis.

Invariant: what somebody else wrote there is an AnabranchError that names the server and the key; but a status that is no
status is that of a producer which does not report: nobody's work ends over it. Held by tests/contract/test_boards.py and
tests/process/test_garbage_in_keys.py.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping
from typing import Any

import redis

from anabranch.schemas.keys import Keys
from anabranch.schemas.metrics import LearnerStatus, ProducerStatus
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport import scripts
from anabranch.transport.boards import STALE_AFTER_MS, VERIFY_WITHIN_MS
from anabranch.transport.redis_client import Guard, whole_number


class RedisRunBoard:
    """Shares its client, which its owner closes."""

    def __init__(self, client: redis.Redis, keys: Keys, *, what: str = "the hub") -> None:
        self._client = client
        self._keys = keys
        self._guard = Guard(client, what)
        self._report = scripts.load(client, "board_report_producer")
        self._producers = scripts.load(client, "board_producers")

    def start(self) -> None:
        self._guard.repeat(lambda: self._client.hdel(self._keys.run_state, "finished"))

    def finish(self, reason: str) -> None:
        self._guard.repeat(lambda: self._client.hsetnx(self._keys.run_state, "finished", reason))

    def finished(self) -> str | None:
        value: bytes | None = self._guard.repeat(lambda: self._client.hget(self._keys.run_state, "finished"))
        return None if value is None else value.decode("utf-8", "backslashreplace")

    def report_learner(self, status: LearnerStatus) -> None:
        self._guard.repeat(lambda: self._client.set(self._keys.learner, status.model_dump_json()))

    def learner(self) -> LearnerStatus | None:
        text: bytes | None = self._guard.repeat(lambda: self._client.get(self._keys.learner))
        key = self._keys.learner
        return self._guard.understand(key, lambda: None if text is None else LearnerStatus.model_validate_json(text))

    def report_producer(self, producer: str, status: ProducerStatus) -> None:
        keys = [self._keys.producers, self._keys.producers_seen]
        self._guard.repeat(lambda: self._report(keys=keys, args=[producer, status.model_dump_json()]))

    def producers(self, *, within_ms: int = STALE_AFTER_MS) -> dict[str, ProducerStatus]:
        flat = self._call_producers(within_ms, "fresh")
        found = {}
        for name, text in zip(flat[::2], flat[1::2], strict=True):
            with contextlib.suppress(ValueError):  # UnicodeDecodeError and pydantic's are such
                found[name.decode()] = ProducerStatus.model_validate_json(text)
        return found

    def drop_stale_producers(self, *, older_ms: int = STALE_AFTER_MS) -> list[str]:
        return sorted(name.decode("utf-8", "backslashreplace") for name in self._call_producers(older_ms, "drop"))

    def request_verification(self, *, ttl_ms: int = VERIFY_WITHIN_MS) -> str:
        token = secrets.token_hex(8)
        self._guard.repeat(lambda: self._client.set(self._keys.verification, token, px=ttl_ms))
        return token

    def verification_wanted(self) -> str | None:
        token: bytes | None = self._guard.repeat(lambda: self._client.get(self._keys.verification))
        return None if token is None else token.decode("utf-8", "backslashreplace")

    def _call_producers(self, ms: int, mode: str) -> list[bytes]:
        keys = [self._keys.producers, self._keys.producers_seen]
        reply: list[bytes] = self._guard.repeat(lambda: self._producers(keys=keys, args=[ms, mode]))
        return reply


class RedisEvaluationBoard:
    """Shares its client, which its owner closes."""

    def __init__(self, client: redis.Redis, keys: Keys, *, what: str = "the hub") -> None:
        self._client = client
        self._keys = keys
        self._guard = Guard(client, what)
        self._take = scripts.load(client, "board_take_shard")
        self._renew = scripts.load(client, "board_renew_shard")
        self._post = scripts.load(client, "board_post_result")

    def request(self, policy: PolicyVersion, shards: int) -> None:
        text = json.dumps({"epoch": policy.epoch, "version": policy.version, "shards": shards})
        self._guard.repeat(lambda: self._client.set(self._keys.evaluation, text))

    def wanted(self) -> tuple[PolicyVersion, int] | None:
        text: bytes | None = self._guard.repeat(lambda: self._client.get(self._keys.evaluation))
        return None if text is None else self._guard.understand(self._keys.evaluation, lambda: _wanted(text))

    def take(self, producer: str, policy: PolicyVersion, lease_ms: int) -> int | None:
        args = [policy.epoch, policy.version, producer, lease_ms]
        shard = int(self._guard.repeat(lambda: self._take(keys=self._evaluation_keys(policy), args=args)))
        return None if shard < 0 else shard

    def renew(self, producer: str, policy: PolicyVersion, shard: int, lease_ms: int) -> bool:
        keys = [self._keys.evaluation_results(policy.epoch, policy.version)]
        return bool(self._guard.repeat(lambda: self._renew(keys=keys, args=[producer, shard, lease_ms])))

    def post(self, policy: PolicyVersion, shard: int, result: Mapping[str, Any]) -> bool:
        args = [policy.epoch, policy.version, shard, json.dumps(dict(result))]
        return bool(self._guard.repeat(lambda: self._post(keys=self._evaluation_keys(policy), args=args)))

    def results(self, policy: PolicyVersion) -> dict[int, dict[str, Any]]:
        key = self._keys.evaluation_results(policy.epoch, policy.version)
        found: dict[bytes, bytes] = self._guard.repeat(lambda: self._client.hgetall(key))
        return self._guard.understand(
            key,
            lambda: {int(shard): json.loads(text) for shard, text in sorted(found.items()) if text.startswith(b"{")},
        )

    def clear(self) -> None:
        wanted = self.wanted()
        if wanted is not None:
            policy, _ = wanted
            key = self._keys.evaluation_results(policy.epoch, policy.version)
            self._guard.repeat(lambda: self._client.delete(self._keys.evaluation, key))

    def _evaluation_keys(self, policy: PolicyVersion) -> list[str]:
        return [self._keys.evaluation, self._keys.evaluation_results(policy.epoch, policy.version)]


def _wanted(text: bytes) -> tuple[PolicyVersion, int]:
    found = json.loads(text)
    epoch, version, shards = (whole_number(found[name]) for name in ("epoch", "version", "shards"))
    return PolicyVersion(epoch, version), shards
