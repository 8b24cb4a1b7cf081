"""`anabranch dead-letter requeue` and `drop`: what would happen, and doing it.

Invariant: what is done is what was shown: the letters are chosen once, by id, so one that is set aside again meanwhile is not
taken a second time; one that is gone is told, not taken for done. Held by tests/unit/deploy/test_dead_letter_moves.py.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from anabranch.deploy.dead_letter_show import verdicts
from anabranch.deploy.dead_letters import Row, check_id, each, row_of
from anabranch.deploy.plain_text import plain, time_of_id
from anabranch.schemas.errors import UsageError
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.schemas.trajectory import decode_group
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.dead_letters import DeadLetter, DeadLetters

TO_LEARNER = "the learner reads it"
EMPTY = "stays here: nothing of the entry was left when it was set aside; drop it"


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What is known of the run here. `trained`: group indices, None if this machine has no record of them; `version`:
    of the learner that reports; `finished`: why the run is over."""

    run: str
    max_entry_bytes: int
    max_age: int
    version: PolicyVersion | None = None
    finished: str | None = None
    trained: Container[int] | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """One letter to be moved, and what will happen to it if it is put back ("" if nobody asked)."""

    row: Row
    outlook: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    chosen: Sequence[Chosen]
    missing: Sequence[str]  # ids that name no letter

    @property
    def rows(self) -> list[Row]:
        """Those that can be moved."""
        return [one.row for one in self.chosen if one.outlook != EMPTY]


@dataclass(frozen=True, slots=True)
class Moved:
    """`entries`: (region, letter id) -> new entry id, "" for one that was dropped."""

    entries: Mapping[tuple[str, str], str]
    gone: Sequence[Row]


def outlook(letter: DeadLetter, known: Knowledge) -> str:
    """What readers would do with it (all of it, from `get`), as far as it can be said beforehand."""
    if not letter.fields:
        return EMPTY
    said = _outlook(letter, known)
    return (
        said if letter.group == LEARNER_GROUP else f"{said}; a foreign entry, since {plain(letter.group)} set it aside"
    )


def _outlook(letter: DeadLetter, known: Knowledge) -> str:
    envelope, group = verdicts(letter.fields, run=known.run, max_entry_bytes=known.max_entry_bytes)
    if envelope or group:
        return f"set aside again: {plain(envelope or group)}"
    if known.finished is not None:
        return f"nobody reads it: the run is over ({plain(known.finished)})"
    found = decode_group(letter.fields[b"payload"])
    oldest = min(span.policy.version for rollout in found.rollouts for span in rollout.spans)
    # Versions go on across epochs, so the distance in versions is the least that the age can be.
    if known.version is not None and known.version.version - oldest > known.max_age:
        return f"dropped:age: sampled by v{oldest}, the learner is at {known.version}"
    if known.trained is not None and found.group_index in known.trained:
        return "dropped:duplicate: its index has been trained"
    return TO_LEARNER if known.trained is not None else f"{TO_LEARNER}; dropped:duplicate if its index has been trained"


def choose_named(regions: Mapping[str, DeadLetters], ids: Sequence[str], known: Knowledge | None = None) -> Choice:
    """Without `known` nobody asks what would happen. Raises UsageError: an id that has not the form of one, or is a letter
    of several regions."""
    chosen, missing = [], []
    for letter_id in dict.fromkeys(map(check_id, ids)):
        found = find(regions, letter_id)
        if found is None:
            missing.append(letter_id)
        else:
            chosen.append(Chosen(row_of(*found), "" if known is None else outlook(found[1], known)))
    return Choice(chosen, missing)


def find(regions: Mapping[str, DeadLetters], letter_id: str) -> tuple[str, DeadLetter] | None:
    """The letter and its region. Raises UsageError: several regions have one of that id."""
    found = [(region, letter) for region, letters in regions.items() if (letter := letters.get(letter_id)) is not None]
    if len(found) > 1:
        raise UsageError(f"letter {letter_id} is in {' and in '.join(region for region, _ in found)}: give --region")
    return found[0] if found else None


def choose_all(regions: Mapping[str, DeadLetters], cause: str, known: Knowledge | None = None) -> Choice:
    """All whose cause contains `cause`, in any case. With `known` each is read whole, one at a time."""
    chosen = []
    for region, letters in regions.items():
        for listed in each(letters, cause):
            if known is None:
                chosen.append(Chosen(row_of(region, listed)))
            elif (letter := letters.get(listed.letter_id)) is not None:
                chosen.append(Chosen(row_of(region, letter), outlook(letter, known)))
    return Choice(chosen, [])


def requeue(
    regions: Mapping[str, DeadLetters], rows: Sequence[Row], say: Callable[[int], None] = lambda _: None
) -> Moved:
    """Put them back; `say` is told how many are. Raises StreamUnavailableError, BackpressureError: some may be back."""
    return _move(rows, lambda row: regions[row.region].requeue(row.letter_id), say)


def drop(regions: Mapping[str, DeadLetters], rows: Sequence[Row], say: Callable[[int], None] = lambda _: None) -> Moved:
    """Discard them; as `requeue`."""
    return _move(rows, lambda row: "" if regions[row.region].drop(row.letter_id) else None, say)


def _move(rows: Sequence[Row], move: Callable[[Row], str | None], say: Callable[[int], None]) -> Moved:
    entries: dict[tuple[str, str], str] = {}
    gone: list[Row] = []
    for row in rows:
        entry = move(row)
        if entry is None:
            gone.append(row)
        else:
            entries[row.region, row.letter_id] = entry
            say(len(entries))
    return Moved(entries, gone)


HEADING = f"{'region':<12} {'letter':<20} {'time (UTC)':<19} {'group':>9} {'bytes':>11}"


def preview(choice: Choice, *, outlooks: bool) -> str:
    """One line a letter, with what will happen to it (`outlooks`) or why it is here."""
    lines = [f"{HEADING}  {'put back, this will happen' if outlooks else 'cause'}"]
    for one in choice.chosen:
        row, last = one.row, one.outlook if outlooks else plain(one.row.cause)
        lines.append(
            f"{row.region:<12} {row.letter_id:<20} {time_of_id(row.letter_id):<19} {row.group_index:>9} "
            f"{row.size_bytes:>11,}  {last}"
        )
    return "\n".join(lines)
