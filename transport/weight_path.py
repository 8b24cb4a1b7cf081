"""The cheapest way to a version of the weight channel: from nothing, or from a state at hand.

Invariant: a path is a chain. It begins with an anchor, or with an entry whose base is a version that has the state at
hand (same digest, whatever its epoch), and each later entry's base is its predecessor's version. Late join, long
absence, missed versions, a new epoch, a rewind and a fork are all this one search. Nothing is guessed from version
numbers: who follows a path checks every base digest on the manifests. With aligned skips of every length, a path over n
versions has at most 2·log2(n) + 2 entries. Held by tests/property/test_weight_path.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry

SHORTER_MAY_COST = 1.25
FETCH_BYTES = 2**16  # what one more manifest costs beyond its payload: round trips, headers, a decode that starts anew


@dataclass(frozen=True, slots=True)
class State:
    """Weights at hand: the version they were published as, and their root digest."""

    policy: PolicyVersion
    digest: str


def cheapest_path(entries: Iterable[IndexEntry], start: State | None, goal: PolicyVersion) -> list[IndexEntry] | None:
    """Entries to apply in order, [] if `goal` has the state at hand already, None if no path leads there.

    Cost is payload bytes plus `FETCH_BYTES` for each entry. Where that makes more than `fetch_limit` entries (skips that
    are larger than what they merge), a path within the limit is taken if it costs no more than `SHORTER_MAY_COST` times
    as much.
    """
    known = sorted((e for e in entries if e.policy <= goal), key=lambda e: e.score)
    here = _places(known, start)
    if goal in here:
        return []
    path = _search(known, here, goal, None)
    if path is None or len(path) <= (limit := fetch_limit(path)):
        return path
    shorter = _search(known, here, goal, limit)
    return path if shorter is None or _cost(shorter) > SHORTER_MAY_COST * _cost(path) else shorter


def fetch_limit(path: Iterable[IndexEntry]) -> int:
    """2·log2(n) + 2 for a path that goes n versions forward: what aligned skips make possible, from an anchor too."""
    steps = sum(entry.policy.version - entry.base.version for entry in path if entry.base is not None)
    return int(2 * math.log2(max(1, steps))) + 2


def _places(known: Iterable[IndexEntry], start: State | None) -> set[PolicyVersion]:
    """Versions that have the state at hand."""
    if start is None:
        return set()
    digests = {entry.policy: entry.digest for entry in known}
    here = {policy for policy, digest in digests.items() if digest == start.digest}
    return here if start.policy in digests else here | {start.policy}


def _search(
    known: Sequence[IndexEntry], here: Collection[PolicyVersion], goal: PolicyVersion, limit: int | None
) -> list[IndexEntry] | None:
    """The cheapest path of at most `limit` entries. One pass in version order, since entries only lead forward; per
    version the best cost for each number of entries, or without a limit just the best."""
    Reached = dict[int, tuple[int, IndexEntry | None]]  # number of entries (0 without a limit) -> cost, last entry
    nothing: Reached = {0: (0, None)}
    reached: dict[PolicyVersion, Reached] = {policy: dict(nothing) for policy in here}
    for entry in known:
        before = nothing if entry.base is None else reached.get(entry.base)
        if before is None:
            continue
        price = entry.payload_bytes + FETCH_BYTES
        at = reached.setdefault(entry.policy, {})
        for count, (cost, _) in before.items():
            after = 0 if limit is None else count + 1
            if limit is not None and after > limit:
                continue
            if after not in at or cost + price < at[after][0]:
                at[after] = cost + price, entry
    if not reached.get(goal):
        return None
    count = min(reached[goal], key=lambda n: reached[goal][n][0])
    path: list[IndexEntry] = []
    policy: PolicyVersion | None = goal
    while policy is not None and (step := reached[policy][count][1]) is not None:
        path.append(step)
        policy, count = step.base, count if limit is None else count - 1
    return path[::-1]


def _cost(path: Iterable[IndexEntry]) -> int:
    return sum(entry.payload_bytes + FETCH_BYTES for entry in path)


def path_bytes(path: Iterable[IndexEntry]) -> int:
    return sum(entry.payload_bytes for entry in path)
