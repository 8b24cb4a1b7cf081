"""`DeadLetters` over the Redis stream in which `RedisStream.dead_letter` puts them.

Invariant: that of `dead_letters.py`; each act is one Lua script (transport/lua/dead_letters_*.lua).
Held by tests/contract/test_dead_letters.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import redis

from anabranch.schemas.errors import UsageError
from anabranch.schemas.keys import LEARNER_GROUP, Keys
from anabranch.transport.dead_letters import LISTED_BYTES, DeadLetter, empty_letter
from anabranch.transport.redis_client import Guard, whole_number
from anabranch.transport.redis_stream import stream_scripts
from anabranch.transport.stream import DEAD_LETTER_FATE
from anabranch.transport.stream_rules import parse_id

_HEAD = 3  # fields of a letter before those of its entry: cause, by, id
_PAGE = 100


class RedisDeadLetters:
    """Those of one region; closing it closes its client. Arguments as those of `RedisStream`."""

    def __init__(self, client: redis.Redis, keys: Keys, *, what: str = "the region's Redis") -> None:
        self._client = client
        self._letters, self._ledger = keys.dead_letters, keys.ledger
        self._guard = Guard(client, what)
        self._scripts = stream_scripts(client, keys)

    def list(self, *, after_id: str = "0-0", max_letters: int = 100) -> list[DeadLetter]:
        parse_id(after_id)
        found: list[DeadLetter] = []
        while (wanted := min(_PAGE, max_letters - len(found))) > 0:
            args = (found[-1].letter_id if found else after_id, wanted, LISTED_BYTES)
            page = self._guard.repeat(lambda args=args: self._scripts.run("dead_letters_list", *args))  # type: ignore[misc]
            found += (_letter(letter_id.decode(), flat, int(size)) for letter_id, flat, size in page)
            if len(page) < wanted:
                break
        return found

    def count(self) -> int:
        return int(self._guard.repeat(lambda: self._client.xlen(self._letters)))

    def made_room(self) -> int:
        count = self._guard.repeat(lambda: self._client.hget(self._ledger, "made_room"))
        return self._guard.understand(self._ledger, lambda: whole_number(count or 0))

    def get(self, letter_id: str) -> DeadLetter | None:
        parse_id(letter_id)
        flat = self._guard.repeat(lambda: self._scripts.run("dead_letters_get", letter_id))
        return _letter(letter_id, flat, sum(map(len, flat))) if flat else None

    def requeue(self, letter_id: str) -> str | None:
        """See the protocol. Tried once: a repetition could not tell a letter that it moved from one that was not there."""
        parse_id(letter_id)
        args = (letter_id, _HEAD, LEARNER_GROUP, DEAD_LETTER_FATE)
        reply = self._guard.once(lambda: self._scripts.run("dead_letters_requeue", *args)).decode()
        if reply == "empty":
            raise UsageError(empty_letter(letter_id))
        return reply or None

    def drop(self, letter_id: str) -> bool:
        """See the protocol. Tried once, as `requeue`."""
        parse_id(letter_id)
        return bool(self._guard.once(lambda: self._client.xdel(self._letters, letter_id)))

    def close(self) -> None:
        self._client.close()


def _letter(letter_id: str, flat: Sequence[bytes], size: int) -> DeadLetter:
    head, entry = flat[: 2 * _HEAD], flat[2 * _HEAD :]
    about = dict(zip(head[::2], head[1::2], strict=True))
    cause, group, entry_id = (about.get(name, b"").decode("utf-8", "replace") for name in (b"cause", b"by", b"id"))
    return DeadLetter(
        letter_id,
        entry_id,
        cause,
        group,
        dict(zip(entry[::2], entry[1::2], strict=True)),
        size - sum(map(len, head)),
    )
