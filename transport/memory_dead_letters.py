"""`DeadLetters` in memory: the public twin of `RedisDeadLetters`, over what `MemoryStream.dead_letter` set aside.

Invariant: that of `dead_letters.py`. Held by tests/contract/test_dead_letters.py.
"""

from __future__ import annotations

from anabranch.schemas.errors import UsageError
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.transport.dead_letters import LISTED_BYTES, DeadLetter, empty_letter
from anabranch.transport.memory_stream_store import Letter, MemoryStreamStore, text_of
from anabranch.transport.stream import DEAD_LETTER_FATE
from anabranch.transport.stream_rules import parse_id


class MemoryDeadLetters:
    def __init__(self, store: MemoryStreamStore) -> None:
        self._store = store

    def list(self, *, after_id: str = "0-0", max_letters: int = 100) -> list[DeadLetter]:
        after = parse_id(after_id)
        with self._store.changed:
            letters = [(i, x) for i, x in self._store.books.letters.items() if i > after]
            return [_shown(text_of(i), x, LISTED_BYTES) for i, x in letters[: max(0, max_letters)]]

    def count(self) -> int:
        with self._store.changed:
            return len(self._store.books.letters)

    def made_room(self) -> int:
        with self._store.changed:
            return self._store.books.made_room

    def get(self, letter_id: str) -> DeadLetter | None:
        with self._store.changed:
            letter = self._store.books.letters.get(parse_id(letter_id))
            return None if letter is None else _shown(letter_id, letter, None)

    def requeue(self, letter_id: str) -> str | None:
        store, letter_key = self._store, parse_id(letter_id)
        with store.changed:
            letter = store.books.letters.get(letter_key)
            if letter is None:
                return None
            if not letter.fields:
                raise UsageError(empty_letter(letter_id))
            store.refuse_when_full()
            del store.books.letters[letter_key]
            entry_id = store.add(letter.fields)
            if letter.group == LEARNER_GROUP:
                store.books.fates[DEAD_LETTER_FATE] -= 1
                store.books.requeued += 1
                store.note_again(entry_id, letter.fields)
            return entry_id

    def drop(self, letter_id: str) -> bool:
        with self._store.changed:
            return self._store.books.letters.pop(parse_id(letter_id), None) is not None

    def close(self) -> None:
        """Nothing to close: the store lives on."""


def _shown(letter_id: str, letter: Letter, value_bytes: int | None) -> DeadLetter:
    size = sum(len(name) + len(value) for name, value in letter.fields.items())
    fields = {name: value[:value_bytes] for name, value in letter.fields.items()}
    return DeadLetter(letter_id, letter.entry_id, letter.cause, letter.group, fields, size)
