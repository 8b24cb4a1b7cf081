"""Dead letters of one region: entries nobody could read, kept with their cause, as a protocol with two implementations
that pass one contract suite.

Invariant: what the learner's group set aside is in the stream or among the dead letters, never waiting in both: `requeue`
moves it back atomically (and takes one from dropped:dead_letter, so the ledger stays exact); repeating it or `drop` does
nothing more. What another group set aside the learner's has dealt with by itself: put back, it is one more entry, which the
ledger counts as foreign. At most `stream.max_dead_letters` are kept; how many had to make room is counted.
Held by tests/contract/test_dead_letters.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

LISTED_BYTES = 256  # of a field's value, in a list


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """`letter_id` names it here; `entry_id` was its name in the stream. `fields` are the first
    `stream.DEAD_LETTER_FIELDS` of the entry, unverified, and `bytes` the size of their names and values."""

    letter_id: str
    entry_id: str
    cause: str
    group: str  # the consumer group that set it aside
    fields: Mapping[bytes, bytes]
    bytes: int


class DeadLetters(Protocol):
    """All methods raise StreamUnavailableError when the server cannot be reached, BackpressureError when it is full, and
    UsageError for an id that is none."""

    def list(self, *, after_id: str = "0-0", max_letters: int = 100) -> list[DeadLetter]:
        """Oldest first, beyond `after_id`. Of each value in `fields` only the first LISTED_BYTES: `get` gives all."""
        ...

    def count(self) -> int: ...

    def made_room(self) -> int:
        """How many were discarded because `stream.max_dead_letters` were there."""
        ...

    def get(self, letter_id: str) -> DeadLetter | None: ...

    def requeue(self, letter_id: str) -> str | None:
        """Put the entry back into the stream, as it was; its new entry id, or None if there is no such letter.

        Raises UsageError: nothing of the entry was left when it was set aside.
        """
        ...

    def drop(self, letter_id: str) -> bool:
        """Discard it (it stays counted as dropped); False if there is no such letter."""
        ...

    def close(self) -> None: ...


def empty_letter(letter_id: str) -> str:
    """What is wrong with requeueing a letter that holds nothing."""
    return f"dead letter {letter_id} holds no entry: somebody had deleted its data before it was set aside; drop it"
