"""The fate log against the streams, and every delivery in its place: logged, in a stream, a dead letter, or in a spool.

Invariant: reading only, and true of a run that goes on: places are read in the order in which a delivery moves (spool, stream,
dead letters, log), so one that moves meanwhile is seen at least once. A producer's numbers count up by one, so one that is
nowhere is lost, unless as many dead letters were discarded. Held by tests/unit/deploy/test_ledger_audit.py and
tests/process/test_ledger_command.py.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabranch.deploy.plain_text import plain
from anabranch.producers.spool_file import SUFFIX, parse_name, scan
from anabranch.producers.spool_load import spool_folders
from anabranch.schemas.config import RunConfig
from anabranch.schemas.fates import CONSUMED, LOGGED, FateRecord, Identity
from anabranch.schemas.keys import LEARNER_GROUP, Keys
from anabranch.transport import wiring
from anabranch.transport.redis_client import Guard, open_client, whole_number
from anabranch.transport.stream import DEAD_LETTER_FATE, LOST_FATE, LedgerCounts

_SHOWN = 5
_PAGE = 1000
_TRIES = 20

Names = set[tuple[str, int]]  # producer, seq


@dataclass(slots=True)
class RegionPlaces:
    """One region's stream at one instant. `last`: producer -> highest sequence number stored; `dead`: names of the dead
    letters that are kept and tell."""

    counts: LedgerCounts
    open: Names = field(default_factory=set)
    last: dict[str, int] = field(default_factory=dict)
    dead: Names = field(default_factory=set)
    in_motion: int = 0  # fates counted while it was read


@dataclass(slots=True)
class RegionAudit:
    logged: int = 0
    settling: int = 0  # logged, and not acknowledged in the stream
    open: int = 0
    dead: int = 0
    spooled: int = 0  # in no other place
    wrong: list[str] = field(default_factory=list)


def read_places(config: RunConfig, region: str) -> RegionPlaces:
    """Raises StreamUnavailableError, ConfigError, or AnabranchError: somebody else wrote to a key of the run."""
    keys, what = Keys(config.run.name), f"the Redis of region {region}"
    stream, letters = wiring.connect_region(config, region), wiring.connect_dead_letters(config, region)
    client = open_client(config.regions[region].url, stream=config.stream, deadline_s=5.0, what=what)
    guard = Guard(client, what)
    try:
        for _ in range(_TRIES):  # until what is read between two looks has not changed: then it is of one instant
            before = stream.ledger(LEARNER_GROUP)
            members, last = guard.once(lambda: _open_and_last(client, keys))
            places = RegionPlaces(stream.ledger(LEARNER_GROUP))
            places.in_motion = sum(places.counts.fates.values()) - sum(before.fates.values())
            if places.counts == before:
                break
        places.open = guard.understand(keys.open_entries, lambda: set(map(_open_name, members)))
        places.last = guard.understand(
            keys.seen, lambda: {name.decode(): whole_number(seq) for name, seq in last.items()}
        )
        after = "0-0"
        while page := letters.list(after_id=after, max_letters=_PAGE):
            after = page[-1].letter_id
            places.dead |= {name for letter in page if (name := _name_of(letter.fields)) is not None}
        return places
    finally:
        for handle in (stream, letters, client):
            handle.close()


def _open_and_last(client: Any, keys: Keys) -> tuple[list[bytes], dict[bytes, bytes]]:
    pipeline = client.pipeline(transaction=True)
    pipeline.zrange(keys.open_entries, 0, -1)
    pipeline.hgetall(keys.seen)
    members, last = pipeline.execute()
    return members, last


def _open_name(member: bytes) -> tuple[str, int]:
    producer, _, seq = member.decode().rpartition(" ")
    return producer, whole_number(seq.encode())


def _name_of(fields: Mapping[bytes, bytes]) -> tuple[str, int] | None:
    try:
        return fields[b"producer"].decode(), int(fields[b"seq"])
    except (KeyError, ValueError):
        return None


def read_spools(directory: Path) -> dict[str, Names]:
    """Region -> what its spools on this machine hold. Raises SpoolError or SchemaVersionError: a file there is no spool."""
    found: dict[str, Names] = {}
    for folder in spool_folders(directory):
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            producer, _ = parse_name(path)
            try:
                segment = scan(path)
            except FileNotFoundError:  # released meanwhile
                continue
            here = {(producer, seq) for seq in range(segment.first_seq, segment.end_seq) if segment.present(seq)}
            found.setdefault(folder.parent.name, set()).update(here)
    return found


def audit(
    places: Mapping[str, RegionPlaces], spools: Mapping[str, Names], records: Iterable[FateRecord]
) -> dict[str, RegionAudit]:
    """Region -> what is where, and what is wrong. Regions without `places` are left out. Pure."""
    lines: Counter[Identity] = Counter()
    fates: dict[str, Counter[str]] = {}
    consumed: Counter[tuple[int, int]] = Counter()
    for record in records:
        lines[record.identity] += 1
        fates.setdefault(record.region, Counter())[record.fate] += 1
        consumed[record.epoch, record.group_index] += record.fate in CONSUMED
    audits = {}
    for region, place in sorted(places.items()):
        logged = {(producer, seq): n for (where, producer, seq), n in lines.items() if where == region}
        audits[region] = _region(place, spools.get(region, set()), logged, fates.get(region, Counter()))
    twice = [f"group {index} in epoch {epoch}" for (epoch, index), n in consumed.items() if n > 1]
    if twice and audits:
        next(iter(audits.values())).wrong.append(f"{len(twice)} groups were trained twice in one epoch: {_some(twice)}")
    return audits


def _region(
    place: RegionPlaces, spooled: Names, logged: Mapping[tuple[str, int], int], fates: Counter[str]
) -> RegionAudit:
    later = {name for name in logged if name[1] > place.last.get(name[0], -1)}
    settling = (logged.keys() & place.open) | (later - place.open)
    somewhere = logged.keys() | place.open | place.dead | spooled
    found = RegionAudit(
        len(logged), len(settling), len(place.open - logged.keys()), len(place.dead - logged.keys()),
        len(spooled - logged.keys() - place.open - place.dead),
    )  # fmt: skip
    if doubled := [_shown(name) for name, n in sorted(logged.items()) if n > 1]:
        found.wrong.append(f"{len(doubled)} deliveries have more than one fate: {_some(doubled)}")
    lost, first = _nowhere(place, somewhere)
    counts = place.counts.fates
    gone = max(0, counts.get(DEAD_LETTER_FATE, 0) - len(place.dead) + counts.get(LOST_FATE, 0))
    if lost > gone:
        found.wrong.append(
            f"{lost} deliveries are nowhere, of which {gone} may be discarded dead letters: {_some(first, lost)}"
        )
    off = sum(n for fate, n in counts.items() if fate in LOGGED) - (sum(fates.values()) - len(settling))
    if abs(off) > place.counts.foreign + place.in_motion:
        many = f"{off} more" if off > 0 else f"{-off} fewer"
        found.wrong.append(
            f"the stream has counted {many} fates than the log has: "
            + ", ".join(f"{f} {counts.get(f, 0)} and {fates[f]}" for f in LOGGED if counts.get(f, 0) != fates[f])
        )
    return found


def _nowhere(place: RegionPlaces, somewhere: Names) -> tuple[int, list[str]]:
    """How many deliveries there must have been that are nowhere, and the first of them: each producer's numbers go from 1 to
    the highest known. What only a dead letter says of itself is not known."""
    highest = dict(place.last)
    for producer, seq in somewhere - place.dead:
        highest[producer] = max(seq, highest.get(producer, seq))
    found: dict[str, set[int]] = {}
    for producer, seq in somewhere:
        if 1 <= seq <= highest.get(producer, 0):
            found.setdefault(producer, set()).add(seq)
    count, first = 0, list[str]()
    for producer, last in sorted(highest.items()):
        here = found.get(producer, set())
        count += last - len(here)
        gaps = (seq for seq in range(1, last + 1) if seq not in here)
        first += (_shown((producer, seq)) for seq in itertools.islice(gaps, _SHOWN - len(first)))
    return count, first


def _shown(name: tuple[str, int]) -> str:
    return f"{plain(name[0], 60)}/{name[1]}"


def _some(names: list[str], count: int | None = None) -> str:
    """`names`, the first of `count` (all of them)."""
    more = (len(names) if count is None else count) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def left_behind(spools: Mapping[str, Names], regions: Collection[str], records: Iterable[FateRecord]) -> dict[str, int]:
    """Region that is none of `regions` -> groups without a fate in its spools here: renamed, or taken out of the
    configuration, it has no producer that sends them."""
    left = {region: set(names) for region, names in sorted(spools.items()) if region not in regions}
    if left:
        for record in records:
            left.get(record.region, set()).discard((record.producer, record.seq))
    return {region: len(names) for region, names in left.items() if names}


def render_audit(audits: Mapping[str, RegionAudit], *, spools_here: bool, left: Mapping[str, int] | None = None) -> str:
    lines = [f"{'region':<12} {'logged':>9} {'settling':>9} {'in stream':>10} {'dead':>7} {'in spool only':>14}"]
    for region, found in audits.items():
        in_spool = f"{found.spooled:,}" if spools_here else "?"
        lines.append(
            f"{region:<12} {found.logged:>9,} {found.settling:>9,} {found.open:>10,} {found.dead:>7,} {in_spool:>14}"
        )
        lines += [f"{'':<12} WRONG: {wrong}" for wrong in found.wrong]
    for region, groups in (left or {}).items():
        lines.append(
            f"{plain(region, 12):<12} WRONG: spools of this region hold {groups:,} groups without a fate, and it is not in the "
            "configuration: a producer of that region would send them"
        )
    if not left and not any(found.wrong for found in audits.values()):
        lines.append("Every delivery has one place, and the streams count what the log has.")
    if not spools_here:
        lines.append("No spool is on this machine: what only a spool holds is not seen.")
    return "\n".join(lines)
