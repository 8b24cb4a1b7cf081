"""What of a run belongs into an object store, and what goes from there. Pure.

Invariant: copying and dropping are decided over both places together, so no turn undoes what another did. Nothing goes from the store
because it is missing here: only what a merged file there holds, what is torn there, and the oldest beyond the budget. Held by
tests/unit/consumers/test_run_copy.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from anabranch.consumers import retention
from anabranch.consumers.recorded_files import TRAJECTORIES_DIRECTORY, RecordedFile, parse_name, split
from anabranch.schemas.step_record import FACTS_FILE, STEPS_DIRECTORY, parse_folder

_TRAJECTORIES, _STEPS = f"{TRAJECTORIES_DIRECTORY}/", f"{STEPS_DIRECTORY}/"


@dataclass(frozen=True, slots=True)
class Held:
    """A file, here or in the store. `changed_ms`: Unix time, by the clock of that place."""

    bytes: int
    changed_ms: int


Files = Mapping[str, Held]  # name below the run directory, with slashes


@dataclass(frozen=True, slots=True)
class Unit:
    """What is copied and dropped as one: a recorded file, or the record of a step, of which the facts stand last. `until_ms`, `region`:
    as in `retention.Record`."""

    key: str
    names: tuple[str, ...]
    bytes: int
    until_ms: int
    region: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """`copy`: oldest first. `drop`: beyond the budget. `given_up`: keys of what is here and was or is beyond it: room that is made by dropping
    something larger does not bring it back. `idle`: names in the store that do not count, to be removed once nobody can be
    reading them that has listed them when they did."""

    copy: list[Unit]
    drop: list[Unit]
    given_up: frozenset[str]
    idle: set[str]


def plan(here: Files, there: Files, *, retain_bytes: int, given_up: frozenset[str] = frozenset()) -> Plan:
    """Trajectories and records of steps alone; what else there is is passed over.

    Args:
        here: what is ready to be copied. A name's content only grows, so one of the same size is the same.
        given_up: of the plan before.
    """
    counted, torn = _units({**there, **here})
    records = [
        retention.Record(Path(unit.key), unit.bytes, unit.until_ms, unit.region)
        for unit in counted
        if unit.key not in given_up
    ]
    gone = given_up | {record.path.as_posix() for record in retention.to_drop(records, retain_bytes=retain_bytes)}
    copy = [unit for unit in counted if unit.key not in gone and lacking(unit, here, there)]
    return Plan(
        copy=sorted(copy, key=lambda unit: (unit.until_ms, unit.key)),
        drop=[unit for unit in counted if unit.key in gone and not there.keys().isdisjoint(unit.names)],
        given_up=gone & {unit.key for unit in counted if not here.keys().isdisjoint(unit.names)},
        idle=(_covered(there) | torn) & there.keys(),
    )


def lacking(unit: Unit, here: Files, there: Files) -> list[str]:
    """Files of a unit that are here and not the same there, in the order in which they are copied."""
    return [
        name for name in unit.names if name in here and (name not in there or there[name].bytes != here[name].bytes)
    ]


def _units(files: Files) -> tuple[list[Unit], set[str]]:
    """What counts, and the names of steps whose facts are missing."""
    units, steps = [], dict[str, list[str]]()
    for name in files:
        _, *folders, _ = ("", *name.split("/"))
        if name.startswith(_STEPS) and len(folders) == 3 and parse_folder(*folders[1:]) is not None:
            steps.setdefault("/".join(folders), []).append(name)
    for file in split(file for name in files if (file := _recorded(name)) is not None)[0]:
        name = f"{_TRAJECTORIES}{file.path.as_posix()}"
        units.append(Unit(name, (name,), files[name].bytes, file.last[0], file.partition.region))
    torn: set[str] = set()
    for folder, names in steps.items():
        facts = f"{folder}/{FACTS_FILE}"
        if facts in files:
            ordered = (*sorted(name for name in names if name != facts), facts)
            units.append(Unit(folder, ordered, sum(files[name].bytes for name in names), files[facts].changed_ms))
        else:
            torn.update(names)
    return units, torn


def _covered(files: Files) -> set[str]:
    covered = split(file for name in files if (file := _recorded(name)) is not None)[1]
    return {f"{_TRAJECTORIES}{file.path.as_posix()}" for file in covered}


def _recorded(name: str) -> RecordedFile | None:
    return parse_name(name.removeprefix(_TRAJECTORIES)) if name.startswith(_TRAJECTORIES) else None
