"""The cheapest way to a version of the weight channel: from nothing, or from a state at hand.

Invariant: a path is a chain. It begins with an anchor, or with an entry whose base is a version that has the state at
hand (same digest, whatever its epoch), and each later entry's base is its predecessor's version. Late join, long
absence, missed versions, a new epoch, a rewind and a fork are all this one search. Nothing is guessed from version
numbers: who follows a path checks every base digest on the manifests. Held by tests/property/test_weight_path.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry

FETCH_BYTES = 2**16  # what one more manifest costs beyond its payload: round trips, headers, a decode that starts anew


@dataclass(frozen=True, slots=True)
class State:
    """Weights at hand: the version they were published as, and their root digest."""

    policy: PolicyVersion
    digest: str


def cheapest_path(entries: Iterable[IndexEntry], start: State | None, goal: PolicyVersion) -> list[IndexEntry] | None:
    """Entries to apply in order, [] if `goal` has the state at hand already, None if no path leads there.

    Cost is payload bytes plus `FETCH_BYTES` for each entry. One pass in version order: entries only lead forward.
    """
    known = sorted((e for e in entries if e.policy <= goal), key=lambda e: e.score)
    cost: dict[PolicyVersion, int] = {}
    came_by: dict[PolicyVersion, IndexEntry | None] = {}
    if start is not None:
        digests = {e.policy: e.digest for e in known}
        here = [policy for policy, digest in digests.items() if digest == start.digest]
        if start.policy not in digests:
            here.append(start.policy)
        for policy in here:
            cost[policy], came_by[policy] = 0, None
    for entry in known:
        before = 0 if entry.base is None else cost.get(entry.base)
        if before is None:
            continue
        total = before + entry.payload_bytes + FETCH_BYTES
        if total < cost.get(entry.policy, total + 1):
            cost[entry.policy], came_by[entry.policy] = total, entry
    if goal not in cost:
        return None
    path: list[IndexEntry] = []
    at: PolicyVersion | None = goal
    while at is not None and (step := came_by[at]) is not None:
        path.append(step)
        at = step.base
    return path[::-1]


def path_bytes(path: Iterable[IndexEntry]) -> int:
    return sum(entry.payload_bytes for entry in path)
