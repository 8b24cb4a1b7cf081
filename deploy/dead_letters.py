"""`anabranch dead-letter ls`: what could not be read, per region, with its cause.

Invariant: listing reads no payloads, whatever their sizes, and changes nothing. What an entry says of itself is unverified,
and shown as such text is (deploy/plain_text.py). Held by tests/unit/deploy/test_dead_letters.py.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anabranch.deploy.plain_text import plain, time_of_id
from anabranch.schemas.errors import UsageError
from anabranch.transport.dead_letters import DeadLetter, DeadLetters

PAGE = 1000
_OWN_TEXT = 40  # characters shown of what an entry says of itself
_LETTER_ID = re.compile(r"[0-9]{1,18}-[0-9]{1,18}")
_WITH_DIGITS = re.compile(r"[\w./'-]*\d[\w./'-]*")


@dataclass(frozen=True, slots=True)
class Row:
    """A dead letter without its payload. `group_index` and `producer` are what the entry says, unverified."""

    region: str
    letter_id: str
    entry_id: str
    cause: str
    set_aside_by: str
    group_index: str
    producer: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Listing:
    """One region. `count`: all there are, whatever was asked for; `made_room`: discarded since too many were there."""

    rows: Sequence[Row]
    count: int
    made_room: int


def row_of(region: str, letter: DeadLetter) -> Row:
    return Row(
        region,
        letter.letter_id,
        letter.entry_id,
        letter.cause,
        letter.group,
        plain(letter.fields.get(b"group", b"-"), _OWN_TEXT),
        plain(letter.fields.get(b"producer", b"-"), _OWN_TEXT),
        letter.bytes,
    )


def each(letters: DeadLetters, cause: str = "") -> Iterator[DeadLetter]:
    """Oldest first, those there when it began, with the beginnings of their values; of them the ones whose cause contains
    `cause`, in any case."""
    after = "0-0"
    left = letters.count()  # those that are set aside meanwhile are left alone
    while left > 0 and (found := letters.list(after_id=after, max_letters=min(PAGE, left))):
        after, left = found[-1].letter_id, left - len(found)
        yield from (letter for letter in found if cause.casefold() in letter.cause.casefold())


def list_region(region: str, letters: DeadLetters, cause: str = "") -> Listing:
    rows = [row_of(region, letter) for letter in each(letters, cause)]
    return Listing(rows, letters.count(), letters.made_room())


def kind_of(cause: str) -> str:
    """`cause` with every word that holds a digit as #, so that the same trouble of several entries counts together."""
    return _WITH_DIGITS.sub("#", cause)


def check_id(letter_id: str) -> str:
    """Raises UsageError: it has not the form of one."""
    if _LETTER_ID.fullmatch(letter_id) is None:
        raise UsageError(f"{plain(letter_id, 60)!r} names no letter: give ids as `anabranch dead-letter ls` shows them")
    return letter_id


HEADING = f"{'region':<12} {'letter':<20} {'time (UTC)':<19} {'group':>9} {'producer':<24} {'bytes':>11}  cause"


def text_of(row: Row) -> str:
    return (
        f"{row.region:<12} {row.letter_id:<20} {time_of_id(row.letter_id):<19} {row.group_index:>9} {row.producer:<24} "
        f"{row.size_bytes:>11,}  {plain(row.cause)}{_by(row.set_aside_by)}"
    )


def _by(group: str) -> str:
    return "" if group == "learner" else f"  [set aside by {plain(group)}]"


def render(listings: Mapping[str, Listing]) -> str:
    """The table, then how many of each cause, then how many there are in all and how many made room."""
    rows = [row for listing in listings.values() for row in listing.rows]
    lines = [HEADING, *map(text_of, rows)] if rows else []
    counts = Counter(kind_of(row.cause) for row in rows)
    if counts:
        lines += ["", f"{'letters':>9}  cause", *(f"{n:>9,}  {plain(kind)}" for kind, n in counts.most_common()), ""]
    for region, listing in listings.items():
        asked = "" if listing.count == len(listing.rows) else f", {len(listing.rows):,} shown"
        room = f"; {listing.made_room:,} older ones were discarded to make room" if listing.made_room else ""
        lines.append(f"{region}: {listing.count:,} dead letter{'' if listing.count == 1 else 's'}{asked}{room}")
    return "\n".join(lines)


def as_json(listings: Mapping[str, Listing]) -> str:
    """One object."""
    return json.dumps({region: _listing_json(listing) for region, listing in listings.items()}, indent=2)


def _listing_json(listing: Listing) -> dict[str, Any]:
    counts = Counter(kind_of(row.cause) for row in listing.rows)
    return {
        "count": listing.count,
        "made_room": listing.made_room,
        "causes": dict(counts.most_common()),
        "letters": [row_json(row) for row in listing.rows],
    }


def row_json(row: Row) -> dict[str, Any]:
    return {
        "letter": row.letter_id,
        "entry": row.entry_id,
        "time": time_of_id(row.letter_id),
        "group": row.group_index,
        "producer": row.producer,
        "bytes": row.size_bytes,
        "cause": plain(row.cause),
        "set_aside_by": plain(row.set_aside_by),
    }
