"""Which entries each consumer has in hand, so that after a lost reply those it never saw can be told from them.

Invariant: bounded by what is pending: when a consumer seems to hold many, the caller is asked to say which of them are
still pending on the server (others may have claimed or settled the rest). Safe from several threads.
Held by tests/unit/transport/test_held_entries.py.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable

CHECK_AT = 4096  # entries of one consumer; then at twice what was found


class HeldEntries:
    def __init__(self, check_at: int = CHECK_AT) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str], set[str]] = {}
        self._unsure: set[tuple[str, str]] = set()  # a reply of theirs was lost: entries may be delivered and unseen
        self._least = check_at
        self._check_at: dict[tuple[str, str], int] = {}

    def add(self, group: str, consumer: str, entry_ids: Iterable[str]) -> bool:
        """Returns whether `keep` should be called with what the server says is pending."""
        who = (group, consumer)
        with self._lock:
            held = self._held.setdefault(who, set())
            held.update(entry_ids)
            return len(held) >= self._check_at.get(who, self._least)

    def keep(self, group: str, consumer: str, pending: Collection[str]) -> None:
        """Forget what is not among `pending`. What was handed out meanwhile by another thread of the same consumer may
        be forgotten too: it is then handed out once more after the next lost reply."""
        who = (group, consumer)
        with self._lock:
            held = self._held.setdefault(who, set())
            held.intersection_update(pending)
            self._check_at[who] = max(self._least, 2 * len(held))

    def of(self, group: str, consumer: str) -> set[str]:
        with self._lock:
            return set(self._held.get((group, consumer), ()))

    def forget(self, group: str, entry_ids: Collection[str]) -> None:
        with self._lock:
            for (held_group, _), held in self._held.items():
                if held_group == group:
                    held.difference_update(entry_ids)

    def forget_group(self, group: str) -> None:
        with self._lock:
            for who in [who for who in self._held if who[0] == group]:
                del self._held[who]
                self._check_at.pop(who, None)
                self._unsure.discard(who)

    def doubt(self, group: str, consumer: str) -> None:
        """A reply to the consumer was lost."""
        with self._lock:
            self._unsure.add((group, consumer))

    def trust(self, group: str, consumer: str) -> None:
        with self._lock:
            self._unsure.discard((group, consumer))

    def is_unsure(self, group: str, consumer: str) -> bool:
        with self._lock:
            return (group, consumer) in self._unsure
