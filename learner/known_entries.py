"""What rank 0 knows of the channel's index without asking: enough to decide on anchors and skips.

Invariant: an anchor is due when the cheapest way from nothing to the head costs more bytes after its anchor than the
anchor itself; so a late joiner never fetches more than two anchors' worth. A skip is worth its place when a follower at
its base would take it. Both ask the follower's own planner (transport/weight_path.py). Held by
tests/unit/learner/test_commits.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.weight_path import FETCH_BYTES, State, cheapest_path, path_bytes

_SHORTEN_FROM = 8  # entries for each version within reach


class KnownEntries:
    """Args:
    reach: so many versions behind the head are remembered, and everything from the newest anchor on.
    """

    def __init__(self, entries: Iterable[IndexEntry], *, reach: int) -> None:
        self._entries = list(entries)
        self._reach = reach
        self._limit = _SHORTEN_FROM * reach + 1000
        self._spent: float = math.inf  # at least what the cheapest path costs after its anchor; inf: not known
        self._anchor_bytes = 0

    def add(self, entry: IndexEntry) -> None:
        self._entries.append(entry)
        if entry.label == "anchor":
            self._spent = math.inf
            floor = min(entry.policy, PolicyVersion(entry.policy.epoch, max(0, entry.policy.version - self._reach)))
            self._entries = [e for e in self._entries if e.policy >= floor]
        elif entry.label == "delta":
            self._spent += entry.payload_bytes
        if len(self._entries) > self._limit:
            self._shorten()
            self._limit = max(self._limit, 2 * len(self._entries))

    def forget(self, dropped: Iterable[IndexEntry]) -> None:
        """They are not on the channel any more: no way leads over them."""
        gone = set(dropped)
        self._entries = [e for e in self._entries if e not in gone]
        self._spent = math.inf

    def _shorten(self) -> None:
        """Of what lies far behind keep the way that leads here: no skip is long enough to make another one cheaper."""
        head = max(e.policy for e in self._entries)
        way = set(cheapest_path(self._entries, None, head) or ())
        near = PolicyVersion(head.epoch, max(0, head.version - self._reach))
        self._entries = [e for e in self._entries if e in way or e.policy >= near]

    def anchor_is_due(self, head: PolicyVersion) -> bool:
        if self._spent <= self._anchor_bytes:
            return False
        path = cheapest_path(self._entries, None, head)
        if not path:
            return True
        self._anchor_bytes, self._spent = path[0].payload_bytes, path_bytes(path[1:])
        return self._spent > self._anchor_bytes

    def is_worth(self, skip: IndexEntry) -> bool:
        assert skip.base is not None
        base = skip.base
        between = [e for e in self._entries if base <= e.policy <= skip.policy]
        digest = next((e.digest for e in between if e.policy == base), "")
        path = cheapest_path(between, State(base, digest), skip.policy)
        return path is None or skip.payload_bytes + FETCH_BYTES < path_bytes(path) + FETCH_BYTES * len(path)
