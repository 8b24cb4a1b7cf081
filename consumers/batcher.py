"""Admission by age and assembly of batches.

Invariant: a group index leaves `GroupQueue` for training at most once in its life; an entry seen twice (a claim, a
reconnect) is recognised and not counted again; no group with a token older than the bound is ever in a batch, since
`take` sweeps before it assembles. The order of a batch depends only on which groups are in it. Pure: no I/O, no clock.
Held by tests/unit/consumers/test_batcher.py.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable

from anabranch.consumers.reader import Arrival
from anabranch.schemas.versions import Forks, PolicyVersion, policy_age


class Verdict(enum.Enum):
    QUEUED = "queued"
    DUPLICATE = "duplicate"  # another entry of this group index was queued or trained: drop this one
    SEEN = "seen"  # this very entry is queued or waits for its acknowledgement already: do nothing


def group_age(arrival: Arrival, now: PolicyVersion, forks: Forks) -> int:
    """Age of the oldest token of the group."""
    policies = {span.policy for rollout in arrival.group.rollouts for span in rollout.spans}
    return max(policy_age(policy, now, forks) for policy in policies)


class TrainedSet:
    """Group indices consumed by an optimizer step: everything below `below`, and `beyond`."""

    def __init__(self, below: int = 0, beyond: Iterable[int] = ()) -> None:
        self.below = below
        self.beyond = set(beyond)

    def add(self, indices: Iterable[int]) -> None:
        self.beyond.update(index for index in indices if index >= self.below)
        while self.below in self.beyond:
            self.beyond.remove(self.below)
            self.below += 1

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and (index < self.below or index in self.beyond)

    def indices(self) -> set[int]:
        return set(range(self.below)) | self.beyond


class GroupQueue:
    """Groups that have arrived and wait for a batch."""

    def __init__(self, trained: TrainedSet, *, unacknowledged: Collection[tuple[str, str]] = ()) -> None:
        """`unacknowledged`: (region, entry id) of entries in `trained` that are not settled in their stream yet."""
        self._trained = trained
        self._entries: set[tuple[str, str]] = set(unacknowledged)
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
        entry = (arrival.region, arrival.entry_id)
        if entry in self._entries:
            return Verdict.SEEN
        index = arrival.group.group_index
        if index in self._trained or index in self._queue:
            return Verdict.DUPLICATE
        self._entries.add(entry)
        self._queue[index] = arrival
        return Verdict.QUEUED

    def forget(self, arrivals: Iterable[tuple[str, str]]) -> None:
        """These entries are settled in their stream and will not be delivered again."""
        self._entries.difference_update(arrivals)

    def from_the_future(self, now: PolicyVersion) -> list[Arrival]:
        """Remove and return every group with a token that claims a policy beyond `now`: no such weights exist."""
        future = [a for a in self._queue.values() if any(s.policy > now for r in a.group.rollouts for s in r.spans)]
        return self._remove(future)

    def sweep(self, now: PolicyVersion, forks: Forks, max_age: int) -> list[Arrival]:
        """Remove and return every group with a token older than `max_age`."""
        return self._remove([a for a in self._queue.values() if group_age(a, now, forks) > max_age])

    def clear(self) -> list[Arrival]:
        """Remove and return everything that waits."""
        return self._remove(list(self._queue.values()))

    def _remove(self, arrivals: list[Arrival]) -> list[Arrival]:
        for arrival in arrivals:
            del self._queue[arrival.group.group_index]
            self._entries.discard((arrival.region, arrival.entry_id))
        return arrivals

    def take(self, count: int) -> list[Arrival] | None:
        """The `count` lowest group indices, in order, or None if there are fewer. Call `sweep` just before."""
        if len(self._queue) < count:
            return None
        batch = [self._queue.pop(index) for index in sorted(self._queue)[:count]]
        self._trained.add(a.group.group_index for a in batch)
        return batch
