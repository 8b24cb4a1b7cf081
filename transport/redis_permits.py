"""`Permits` on the hub's Redis, with the hub's clock.

Invariant: that of `permits.py`; each act is one Lua script (transport/lua/permits_*.lua), which a server out of memory runs
as a whole (those that free, or only move what is there) or not at all. A `take` whose reply was lost is repeated with its
nonce, by the next call too, and gets the same permits, so no lease is left to run out for nothing.
Held by tests/contract/test_permits.py, tests/contract/test_permit_full_hub.py and tests/contract/test_lost_replies.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import redis

from anabranch.schemas.keys import Keys
from anabranch.transport import permit_rules, scripts
from anabranch.transport.permits import Permit, PermitState
from anabranch.transport.redis_client import Guard, whole_number


class RedisPermits:
    """The permits of one run. Shares its client, which its owner closes. One thread at a time may `take` for a producer."""

    def __init__(self, client: redis.Redis, keys: Keys, *, what: str = "the hub") -> None:
        self._keys = keys
        self._client = client
        self._guard = Guard(client, what)
        acts = ("take", "renew", "release", "give_up", "surrender", "advance", "reset", "state")
        self._acts = {act: scripts.load(client, f"permits_{act}") for act in acts}
        self._unanswered: dict[str, str] = {}  # producer -> nonce of a `take` that may have been carried out

    def _run(self, act: str, keys: Sequence[str], args: Sequence[object]) -> Any:
        return self._guard.repeat(lambda: self._acts[act](keys=keys, args=args))

    def take(self, producer: str, *, max_groups: int, lease_ms: int) -> list[Permit]:
        if max_groups <= 0:
            return []
        k = self._keys
        keys = [k.permits, k.leases, k.holders, k.returned, k.attempts, k.takes, k.abandoned]
        nonce = self._unanswered.setdefault(producer, secrets.token_hex(8))
        reply: list[int] = self._run("take", keys, [producer, max_groups, lease_ms, nonce])
        del self._unanswered[producer]
        if not reply:
            return []
        return self._guard.understand("a key of the permits", lambda: _permits(reply))

    def renew(self, producer: str, group_indices: Sequence[int], *, lease_ms: int) -> list[int]:
        if not group_indices:
            return []
        k = self._keys
        return list(
            map(int, self._run("renew", [k.permits, k.leases, k.holders], [producer, lease_ms, *group_indices]))
        )

    def give_up(self, producer: str, group_indices: Sequence[int], *, max_attempts: int | None) -> list[int]:
        if not group_indices:
            return []
        k = self._keys
        keys = [k.leases, k.holders, k.returned, k.attempts, k.abandoned]
        return list(map(int, self._run("give_up", keys, [producer, max_attempts or 0, *group_indices])))

    def surrender(self, producer: str, *, keep: Collection[int] = ()) -> int:
        k = self._keys
        return int(self._run("surrender", [k.leases, k.holders, k.returned, k.takes], [producer, *keep]))

    def abandoned(self) -> set[int]:
        k = self._keys
        members = self._guard.repeat(lambda: self._client.zrange(k.abandoned, 0, -1))
        return self._guard.understand(k.abandoned, lambda: set(map(whole_number, members)))

    def state(self) -> PermitState:
        k = self._keys
        reply = self._run("state", [k.permits, k.leases, k.holders, k.returned, k.abandoned], [])
        abandoned = self.abandoned()
        return self._guard.understand(k.permits, lambda: _state(reply, abandoned))

    def settle(self, group_indices: Sequence[int]) -> None:
        self._end_leases("accepted", group_indices)

    def give_back(self, group_indices: Sequence[int], *, attempts: Mapping[int, int] | None = None) -> None:
        known = attempts or {}
        self._end_leases("returned", [f"{i}:{known[i]}" if i in known else i for i in group_indices])

    def _end_leases(self, outcome: str, group_indices: Sequence[int | str]) -> None:
        if not group_indices:
            return
        k = self._keys
        keys = [k.permits, k.leases, k.holders, k.returned, k.attempts, k.abandoned]
        self._run("release", keys, [outcome, *group_indices])

    def advance(self, version: int, *, epoch: int | None = None, abandoned: Collection[int] = ()) -> None:
        k = self._keys
        keys = [k.permits, k.leases, k.holders, k.returned, k.attempts, k.abandoned]
        open_epoch = int(self._run("advance", keys, [version, "" if epoch is None else epoch, *sorted(abandoned)]))
        permit_rules.check_open(k.run, asked=epoch, open_epoch=open_epoch)

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
        k = self._keys
        keys = [k.permits, k.leases, k.holders, k.returned, k.takes, k.attempts, k.abandoned]
        limit = permit_rules.limit(version, batch=batch, max_age=max_age, total=total)
        ranges = permit_rules.ranges(permit_rules.plausible(accepted, limit))
        flat = [bound for pair in ranges for bound in pair]
        args = [epoch, version, batch, max_age, total, limit, len(ranges), *flat, *sorted(abandoned)]
        newer: bytes = self._run("reset", keys, args)
        if newer:
            raise permit_rules.taken_over(k.run, epoch, int(newer))


def _permits(reply: Sequence[bytes | int]) -> list[Permit]:
    epoch, version, batch, max_age, *flat = map(whole_number, reply)
    return [
        Permit(
            index,
            attempt,
            permit_rules.min_policy(index, epoch=epoch, version=version, batch=batch, max_age=max_age, skipped=skipped),
        )
        for index, attempt, skipped in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    ]


def _state(reply: Sequence[Any], abandoned: Collection[int]) -> PermitState:
    epoch, *counts = reply[:6]
    version, next_index, limit, returned, expired = map(whole_number, counts)
    leased = {name.decode("utf-8", "backslashreplace"): n for name, n in zip(reply[6::2], reply[7::2], strict=True)}
    return PermitState(
        epoch=whole_number(epoch) if epoch else None,
        version=version,
        next_index=next_index,
        limit=permit_rules.raised(limit, abandoned),
        leased=dict(sorted(leased.items())),
        expired=expired,
        returned=returned,
        abandoned=len(abandoned),
    )
