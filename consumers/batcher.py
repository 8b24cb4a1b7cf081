"""Admission by age and assembly of batches.

Invariant: a group index leaves `GroupQueue` for training at most once in its life; a delivery seen twice (a claim, a
reconnect, a server that forgot it and got it again under another entry id) is recognised by its identity and not counted
again; no group with a token older than the bound is in a batch of whoever sweeps before `take`. The order of a
batch depends only on which groups are in it. Pure: no I/O, no clock. Held by tests/unit/consumers/test_batcher.py.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable

from anabranch.consumers.arrivals import Arrival
from anabranch.schemas.fates import Identity
from anabranch.schemas.versions import Forks, PolicyVersion, policy_age


class Verdict(enum.Enum):
    QUEUED = "queued"
    DUPLICATE = "duplicate"  # another delivery of this group index was queued or trained: drop this one
    SEEN = "seen"  # this very delivery is queued or waits for its acknowledgement already: nothing more to do


def group_age(arrival: Arrival, now: PolicyVersion, forks: Forks) -> int:
    """Age of the oldest token of the group."""
    return max(policy_age(policy, now, forks) for policy in arrival.group.policies)


def claims_the_future(arrival: Arrival, now: PolicyVersion) -> bool:
    """Whether a token claims a policy beyond `now`: no such weights exist."""
    return any(policy > now for policy in arrival.group.policies)


class TrainedSet:
    """Group indices that no step will consume any more: all below `below`, `beyond`, and those `abandoned`, which never
    arrive (see transport/permits.py) and whose places went to others."""

    def __init__(self, below: int = 0, beyond: Iterable[int] = (), abandoned: Iterable[int] = ()) -> None:
        self.below = below
        self.beyond = set(beyond)
        self.abandoned = frozenset(abandoned)  # replaced, never changed: another thread may look at it

    def add(self, indices: Iterable[int]) -> None:
        self.beyond.update(index for index in indices if index >= self.below)
        self._advance()

    def skip(self, abandoned: Iterable[int]) -> None:
        self.abandoned |= set(abandoned)
        self._advance()

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and (index < self.below or index in self.beyond or index in self.abandoned)

    def indices(self) -> set[int]:
        return set(range(self.below)) | self.beyond | self.abandoned

    def _advance(self) -> None:
        while self.below in self.beyond or self.below in self.abandoned:
            self.beyond.discard(self.below)
            self.below += 1


class GroupQueue:
    """Groups that have arrived and wait for a batch, and which entries carry them until they are settled."""

    def __init__(self, trained: TrainedSet) -> None:
        self._trained = trained
        self._entries: dict[Identity, list[str]] = {}  # newest entry id first
        self._queue: dict[int, Arrival] = {}

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def indices(self) -> set[int]:
        return set(self._queue)

    def depth(self) -> dict[str, int]:
        """Region -> groups waiting."""
        return dict(Counter(arrival.region for arrival in self._queue.values()))

    def offer(self, arrival: Arrival) -> Verdict:
        if arrival.identity in self._entries:
            entries = self._entries[arrival.identity]
            if arrival.entry_id not in entries:
                entries.insert(0, arrival.entry_id)
            return Verdict.SEEN
        index = arrival.group.group_index
        if index in self._trained or index in self._queue:
            return Verdict.DUPLICATE
        self._entries[arrival.identity] = [arrival.entry_id]
        self._queue[index] = arrival
        return Verdict.QUEUED

    def knows(self, arrival: Arrival) -> bool:
        """Whether this very delivery is queued, or in a batch and not released."""
        return arrival.identity in self._entries

    def entries(self, arrival: Arrival) -> list[str]:
        """The entries that carry the delivery, newest first: more than one when it came again."""
        return list(self._entries.get(arrival.identity, [arrival.entry_id]))

    def release(self, arrival: Arrival) -> list[str]:
        """The group has its fate, which others remember from now on; returns `entries`."""
        return self._entries.pop(arrival.identity, [arrival.entry_id])

    def from_the_future(self, now: PolicyVersion) -> list[Arrival]:
        """Remove and return every group with a token that claims a policy beyond `now`."""
        return self._remove([a for a in self._queue.values() if claims_the_future(a, now)])

    def sweep(self, now: PolicyVersion, forks: Forks, max_age: int) -> list[Arrival]:
        """Remove and return every group with a token older than `max_age`."""
        return self._remove([a for a in self._queue.values() if group_age(a, now, forks) > max_age])

    def clear(self) -> list[Arrival]:
        """Remove and return everything that waits."""
        return self._remove(list(self._queue.values()))

    def _remove(self, arrivals: list[Arrival]) -> list[Arrival]:
        for arrival in arrivals:
            del self._queue[arrival.group.group_index]
        return arrivals

    def take(self, count: int) -> list[Arrival] | None:
        """The `count` lowest group indices, in order, or None if there are fewer. All must have been swept, or judged at their
        arrival, by the version that the batch is for."""
        if len(self._queue) < count:
            return None
        batch = [self._queue.pop(index) for index in sorted(self._queue)[:count]]
        self._trained.add(a.group.group_index for a in batch)
        return batch
