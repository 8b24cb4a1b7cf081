"""Short ways to say what tests of permits say again and again, and a hub whose clock steps and whose memory fails."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection

from anabranch.transport.memory_permits import MemoryPermits
from anabranch.transport.permits import Permits
from anabranch.transport.redis_permits import RedisPermits

LONG_MS = 600_000


def opened(make: Callable[[], Permits], **settings: int) -> Permits:
    permits = make()
    reset(permits, **settings)
    return permits


def reset(
    permits: Permits, *, accepted: Collection[int] = (), abandoned: Collection[int] = (), **settings: int
) -> None:
    asked = {"epoch": 1, "version": 0, "batch": 4, "max_age": 1, "total": 100, **settings}
    permits.reset(**asked, accepted=accepted, abandoned=abandoned)


def take(permits: Permits, n: int, producer: str = "p", lease_ms: int = LONG_MS) -> list[int]:
    return [p.group_index for p in permits.take(producer, max_groups=n, lease_ms=lease_ms)]


def shift_clock(permits: Permits, ms: float) -> None:
    """As if the hub's clock had moved by `ms` (back, if negative): every lease ends that much earlier."""
    if isinstance(permits, MemoryPermits):
        for lease in permits._leases.values():
            lease.expires_ms -= ms
        return
    assert isinstance(permits, RedisPermits)
    client, key = permits._client, permits._keys.leases
    for index, expiry in client.zrange(key, 0, -1, withscores=True):
        client.zadd(key, {index: expiry - ms})


def snapshot(permits: Permits) -> Callable[[], None]:
    """What the hub has on its disk now; the result brings that back, as a restart does that forgets the last second."""
    if isinstance(permits, MemoryPermits):
        kept = copy.deepcopy(
            {name: value for name, value in vars(permits).items() if name not in ("_lock", "_clock_ms")}
        )
        return lambda: vars(permits).update(copy.deepcopy(kept))
    assert isinstance(permits, RedisPermits)
    client, prefix = permits._client, permits._keys.permits.removesuffix("permits")
    dumped = {key: client.dump(key) for key in client.scan_iter(f"{prefix}*", count=1000)}

    def restore() -> None:
        for key in client.scan_iter(f"{prefix}*", count=1000):
            client.delete(key)
        for key, value in dumped.items():
            client.restore(key, 0, value)

    return restore


def size(permits: Permits) -> int:
    """How many things the permits remember at all."""
    if isinstance(permits, MemoryPermits):
        return sum(len(value) for value in vars(permits).values() if isinstance(value, dict | set))
    assert isinstance(permits, RedisPermits)
    client, k = permits._client, permits._keys
    hashes = sum(client.hlen(key) for key in (k.holders, k.attempts, k.takes))
    return hashes + sum(client.zcard(key) for key in (k.leases, k.returned, k.abandoned))
