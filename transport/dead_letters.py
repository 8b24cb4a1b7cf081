"""Dead letters of one region: entries nobody could read, kept with their cause, as a protocol with two implementations
that pass one contract suite.

Invariant: an entry is in the stream or among the dead letters, never in both: `requeue` moves it back atomically (and takes
one from dropped:dead_letter, so the ledger stays exact), and both are harmless to repeat. At most `stream.max_dead_letters`
are kept; how many had to make room is counted. Held by tests/contract/test_dead_letters.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """`letter_id` names it here; `entry_id` was its name in the stream. `fields` are those of the entry, unverified."""

    letter_id: str
    entry_id: str
    cause: str
    group: str  # the consumer group that set it aside
    fields: Mapping[bytes, bytes]


class DeadLetters(Protocol):
    """All methods raise StreamUnavailableError when the server cannot be reached, BackpressureError when it is full."""

    def list(self, *, after_id: str = "0-0", max_letters: int = 100) -> list[DeadLetter]:
        """Oldest first, beyond `after_id`."""
        ...

    def count(self) -> int: ...

    def made_room(self) -> int:
        """How many were discarded because `stream.max_dead_letters` were there."""
        ...

    def get(self, letter_id: str) -> DeadLetter | None: ...

    def requeue(self, letter_id: str) -> str | None:
        """Put the entry back into the stream, as it was; its new entry id, or None if there is no such letter."""
        ...

    def drop(self, letter_id: str) -> bool:
        """Discard it (it stays counted as dropped); False if there is no such letter."""
        ...
