"""Permits: the right to start a group, handed out so that age stays bounded while nothing idles.

Invariant (capacity rule): with batch size B, age bound S and learner version v, no more than min((S + v + 1)·B, total) group
indices that are not abandoned have ever been handed out, always the lowest ones; every index below `next` is exactly one of
accepted, leased, returned or abandoned, so a producer that dies costs its leases' time and no group, and a learner that
settles what arrives can complete every batch. Nothing kept grows with the groups of a run, but for the abandoned ones.
Held by tests/contract/test_permits.py and tests/contract/test_permit_rules.py.

A group index names a position in the run's prompt order: index g is trained in step (g − abandoned indices below g) // B
when nothing is late.

Abandoned is final: the index's place went to another one. Should it arrive nevertheless, whoever knows drops it as a
duplicate. The learner tells the hub what it knows to be abandoned whenever it advances or resets, since a hub may forget its
last second; for the same reason it repeats `advance` while it waits, and settles duplicates too.

The hub's clock may step. Forward: leases end early, their groups are sampled twice and trained once. Backward: an expiry
further away than twice the longest lease ever asked for counts as past, so that a step never keeps a group for longer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from anabranch.schemas.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class Permit:
    """Start group `group_index`, with weights at or after `min_policy` (so that S = 0 is synchronous). `granted_ms`: Unix time by the
    clock of whoever took it, who fills it in; 0: not known."""

    group_index: int
    attempt: int
    min_policy: PolicyVersion
    granted_ms: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class PermitState:
    """`limit`: first index that may not be handed out, what abandoned indices add included. `leased`: producer -> group
    indices on a lease that runs; `expired`: leases that ran out and wait to be handed out again, as do the `returned`. All 0
    and None before a learner has opened the run."""

    epoch: int | None
    version: int
    next_index: int
    limit: int
    leased: Mapping[str, int]
    expired: int
    returned: int
    abandoned: int


class Permits(Protocol):
    """All methods raise StreamUnavailableError when the hub cannot be reached. Times are the hub's clock."""

    def take(self, producer: str, *, max_groups: int, lease_ms: int) -> list[Permit]:
        """Up to `max_groups` permits, lowest index first: expired leases and returned indices (attempt + 1) before new
        ones. Empty when the bound is reached or no learner has opened the run."""
        ...

    def renew(self, producer: str, group_indices: Sequence[int], *, lease_ms: int) -> list[int]:
        """Extend leases still held by `producer`; returns those that are no longer its own."""
        ...

    def give_up(self, producer: str, group_indices: Sequence[int], *, max_attempts: int | None) -> list[int]:
        """Producer: it could not finish these groups. Those it still has the lease of are handed out again at once, as a
        further attempt; one that was given up `max_attempts` times is abandoned and makes room for another index. None: no
        fault of the groups (a stop), not counted. Leases that ran out do not count either: a producer that died says
        nothing about its groups. Returns the abandoned ones. Harmless to repeat."""
        ...

    def surrender(self, producer: str, *, keep: Collection[int] = ()) -> int:
        """Producer, at start: what an earlier process of this name held and is not in `keep` is handed out again at once.
        Returns how many."""
        ...

    def abandoned(self) -> set[int]:
        """Group indices that will never arrive."""
        ...

    def state(self) -> PermitState: ...

    def settle(self, group_indices: Sequence[int]) -> None:
        """Learner: these groups have arrived; whoever held a lease on them no longer does, and they are not handed out
        again. Nothing is counted: harmless to repeat, and to say of an abandoned one."""
        ...

    def give_back(self, group_indices: Sequence[int], *, attempts: Mapping[int, int] | None = None) -> None:
        """Learner: these groups were dropped, hand them out again (the abandoned ones not). `attempts`: which attempt at an
        index it was; where a later one is on a lease, that one goes on."""
        ...

    def advance(self, version: int, *, epoch: int | None = None, abandoned: Collection[int] = ()) -> None:
        """Learner: version v of `epoch` (None: of the one that is open) is published; raises the limit to
        min((S + v + 1)·B, total), beside the abandoned. `abandoned`: those it has skipped; the hub forgets none of them.
        Harmless to repeat.

        Raises:
            TemporaryError: no epoch is open, or an older one is (the hub lost its data); nothing is raised.
            ConfigError: a newer epoch is open; nothing is raised.
        """
        ...

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
        """Learner, at start: open the epoch at `version`. `accepted` are the indices trained before the checkpoint or
        still waiting in a stream (abandoned ones may be among them); `abandoned` those that it has skipped, beside which
        the hub keeps the ones it knows. Every other index ever handed out and not leased now is returned (and waits while
        it is at or above the new limit). Atomic. Raises ConfigError when a newer epoch is open."""
        ...
