"""`Permits` on the hub's Redis, with the hub's clock.

Invariant: that of `permits.py`; each act is one Lua script (transport/lua/permits_*.lua). A `take` whose reply was
lost is repeated with its nonce and gets the same permits, so no lease is left to run out for nothing.
Held by tests/contract/test_permits.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence

import redis

from anabranch.schemas.keys import Keys
from anabranch.transport import permit_rules, scripts
from anabranch.transport.permits import Permit
from anabranch.transport.redis_client import Guard


class RedisPermits:
    """The permits of one run. Shares its client, which its owner closes."""

    def __init__(self, client: redis.Redis, keys: Keys, *, what: str = "the hub") -> None:
        self._keys = keys
        self._guard = Guard(client, what)
        self._take = scripts.load(client, "permits_take")
        self._renew = scripts.load(client, "permits_renew")
        self._release = scripts.load(client, "permits_release")
        self._advance = scripts.load(client, "permits_advance")
        self._reset = scripts.load(client, "permits_reset")

    def take(self, producer: str, *, max_groups: int, lease_ms: int) -> list[Permit]:
        if max_groups <= 0:
            return []
        k = self._keys
        keys = [k.permits, k.leases, k.holders, k.returned, k.attempts, k.takes]
        args = [producer, max_groups, lease_ms, secrets.token_hex(8)]
        reply: list[int] = self._guard.repeat(lambda: self._take(keys=keys, args=args))
        if not reply:
            return []
        epoch, version, batch, max_age, *flat = map(int, reply)
        return [
            Permit(
                index,
                attempt,
                permit_rules.min_policy(index, epoch=epoch, version=version, batch=batch, max_age=max_age),
            )
            for index, attempt in zip(flat[::2], flat[1::2], strict=True)
        ]

    def renew(self, producer: str, group_indices: Sequence[int], *, lease_ms: int) -> list[int]:
        if not group_indices:
            return []
        args = [producer, lease_ms, *group_indices]
        lost = self._guard.repeat(lambda: self._renew(keys=[self._keys.leases, self._keys.holders], args=args))
        return [int(index) for index in lost]

    def settle(self, group_indices: Sequence[int]) -> None:
        self._end_leases("accepted", group_indices)

    def give_back(self, group_indices: Sequence[int]) -> None:
        self._end_leases("returned", group_indices)

    def _end_leases(self, outcome: str, group_indices: Sequence[int]) -> None:
        if not group_indices:
            return
        k = self._keys
        keys = [k.permits, k.leases, k.holders, k.returned]
        self._guard.repeat(lambda: self._release(keys=keys, args=[outcome, *group_indices]))

    def advance(self, version: int, *, epoch: int | None = None) -> None:
        """Raises TemporaryError when no epoch is open (the hub lost its data), ConfigError when a newer one is."""
        args = [version, "" if epoch is None else epoch]
        open_epoch = int(self._guard.repeat(lambda: self._advance(keys=[self._keys.permits], args=args)))
        if not open_epoch:
            raise permit_rules.not_open(self._keys.run)
        if epoch is not None and open_epoch > epoch:
            raise permit_rules.taken_over(self._keys.run, epoch, open_epoch)

    def reset(
        self, *, epoch: int, version: int, batch: int, max_age: int, total: int, accepted: Collection[int]
    ) -> None:
        """Raises ConfigError when a newer epoch is open."""
        k = self._keys
        keys = [k.permits, k.leases, k.holders, k.returned, k.takes]
        limit = permit_rules.limit(version, batch=batch, max_age=max_age, total=total)
        flat = [bound for pair in permit_rules.ranges(accepted) for bound in pair]
        args = [epoch, version, batch, max_age, total, limit, *flat]
        newer: bytes = self._guard.repeat(lambda: self._reset(keys=keys, args=args))
        if newer:
            raise permit_rules.taken_over(self._keys.run, epoch, int(newer))
