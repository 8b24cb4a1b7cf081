"""Which group indices this producer has a lease on, and what for. No I/O; used by the engine's thread and the hub link's.

Invariant: an index that is leased to us is in exactly one place: granted (not started), held (being sampled, or finished and
on its way to its stream) or handed back (the hub has not heard yet). Each of them is renewed, so that nobody else samples it
meanwhile, except what has waited for its stream longer than it may. An index whose lease went to somebody else while the
engine was at it is `lost` until the engine lets go of it, and is not started here before that.
Held by tests/unit/producers/test_hub_link.py and tests/unit/producers/test_hub_link_leases.py.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable

from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.permits import Permit


class PermitBook:
    """Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._granted: dict[int, tuple[Permit, float]] = {}  # with when it was granted
        self._held: dict[int, float] = {}  # until when its lease is renewed; while it is sampled: for ever
        self._handed_back: dict[int, bool] = {}  # whether that counts against the group
        self._lost: set[int] = set()
        self._too_new: PolicyVersion | None = None  # asked for by permits that were handed back, and not served yet

    @property
    def granted(self) -> int:
        with self._lock:
            return len(self._granted)

    def grant(self, permits: Iterable[Permit], now: float) -> None:
        """What is leased to us already (its lease had run out, and came back to us) goes on as it was."""
        with self._lock:
            for permit in permits:
                index = permit.group_index
                if index not in self._held and index not in self._handed_back:
                    self._granted[index] = (permit, now)

    def take(self, serving: PolicyVersion | None, most: int) -> list[Permit]:
        """Granted permits that `serving` satisfies, lowest index first; they are held from now on."""
        with self._lock:
            if serving is None:
                return []
            ready = sorted(i for i, (p, _) in self._granted.items() if p.min_policy <= serving and i not in self._lost)
            permits = [self._granted.pop(index)[0] for index in ready[: max(0, most)]]
            self._held.update((permit.group_index, math.inf) for permit in permits)
            return permits

    def wants_policy(self, serving: PolicyVersion | None) -> PolicyVersion | None:
        """The lowest version that a permit asks for, when `serving` is older than all of them ask for."""
        with self._lock:
            asked = min((permit.min_policy for permit, _ in self._granted.values()), default=self._too_new)
            return asked if asked is not None and serving is not None and asked > serving else None

    def may_take(self, serving: PolicyVersion | None) -> bool:
        """False while the weights served are those for which permits had to be handed back: they would come again."""
        with self._lock:
            if serving is not None and self._too_new is not None and serving >= self._too_new:
                self._too_new = None
            return serving is not None and self._too_new is None

    def hold(self, indices: Collection[int], until: float) -> None:
        """Finished and spooled, not in the stream yet: their leases are renewed, and not beyond `until`."""
        with self._lock:
            for index in indices:
                if index not in self._lost:
                    self._held[index] = until

    def release(self, index: int) -> None:
        """The engine is done with it and its lease may run out."""
        with self._lock:
            if index in self._lost:
                self._lost.discard(index)  # a new permit for it may be ours already: that one stays
            else:
                self._held.pop(index, None)

    def hand_back(self, index: int, *, failed: bool) -> None:
        """The engine is done with it and has no result: somebody else's as soon as the hub hears."""
        with self._lock:
            if index in self._lost:
                self._lost.discard(index)
            elif self._held.pop(index, None) is not None:
                self._handed_back[index] = failed

    def hand_back_granted(self) -> None:
        """Nothing more is started."""
        with self._lock:
            self._handed_back.update(dict.fromkeys(self._granted, False))
            self._granted.clear()

    def hand_back_stale(self, serving: PolicyVersion | None, granted_before: float) -> None:
        """Permits that have waited for newer weights for long: others may have them."""
        with self._lock:
            if serving is None:
                return
            for index, (permit, since) in list(self._granted.items()):
                if permit.min_policy > serving and since < granted_before:
                    del self._granted[index]
                    self._handed_back[index] = False
                    wanted = self._too_new
                    self._too_new = permit.min_policy if wanted is None else min(wanted, permit.min_policy)

    def handed_back(self, *, failed: bool) -> list[int]:
        with self._lock:
            return sorted(index for index, fault in self._handed_back.items() if fault is failed)

    def heard(self, indices: Iterable[int]) -> None:
        """The hub knows that these are handed back."""
        with self._lock:
            for index in indices:
                self._handed_back.pop(index, None)

    def lost(self) -> set[int]:
        with self._lock:
            return set(self._lost)

    def to_renew(self, now: float) -> list[int]:
        """Every lease that is to go on. What has waited for its stream for too long is let go."""
        with self._lock:
            self._held = {index: until for index, until in self._held.items() if until > now}
            return sorted({*self._held, *self._granted, *self._handed_back})

    def gone(self, indices: Collection[int]) -> None:
        """These turned out to be nobody's or somebody else's."""
        with self._lock:
            for index in indices:
                self._granted.pop(index, None)
                self._handed_back.pop(index, None)
                if self._held.pop(index, 0.0) == math.inf:  # else it is finished, and sampling it again harms nobody
                    self._lost.add(index)
