"""From what a person types to the one trajectory, or group, that is meant.

Invariant: a name that fits more than one is refused with some of them, and one that fits none with the nearest there are; a whole
id means that trajectory alone, also where it is the beginning of others. Held by tests/unit/consumers/test_find_trajectory.py.

An id is REGION/PRODUCER/SEQ/SAMPLE. Region and producer may be cut short (`e/east-0/17/3`), or left out (`17/3`).
"""

from __future__ import annotations

import difflib
from typing import Any

from anabranch.consumers.run_reader import RunReader
from anabranch.schemas.errors import UsageError
from anabranch.schemas.trajectory_id import TrajectoryId, encode_part

_SHOWN = 5
_NAMES = "SELECT DISTINCT region, producer FROM trajectories ORDER BY ALL"


def find_trajectory(reader: RunReader, text: str) -> TrajectoryId:
    """Raises UsageError: none, or several."""
    return _find(reader, text, sample=True)


def find_group(reader: RunReader, text: str) -> TrajectoryId:
    """As `find_trajectory`; the id of a trajectory means its group. Raises UsageError."""
    parts = text.split("/")
    if len(parts) == 4:
        return find_trajectory(reader, text).group
    return _find(reader, text, sample=False)


def _find(reader: RunReader, text: str, *, sample: bool) -> TrajectoryId:
    parts = [part for part in text.strip().split("/")]
    count = 2 if sample else 1
    numbers = parts[-count:]
    names = parts[:-count]
    if len(names) > 2 or len(numbers) < count or not all(n.isascii() and n.isdigit() and len(n) < 19 for n in numbers):
        wanted = "REGION/PRODUCER/SEQ/SAMPLE" if sample else "REGION/PRODUCER/SEQ"
        raise UsageError(
            f"{text[:200]!r} is no id{'' if sample else ' of a group'}: {wanted}, as `anabranch replay ls` shows it; or its end"
        )
    there = [(row["region"], row["producer"]) for row in reader.rows(_NAMES)]
    if not there:
        raise UsageError(f"no trajectory is recorded{f' in {reader.directory}' if reader.directory else ''} yet")
    pairs = _matching(there, names)
    if not pairs:
        known = [f"{encode_part(r)}/{encode_part(p)}" for r, p in there]
        near = difflib.get_close_matches("/".join(names), known, n=_SHOWN, cutoff=0.0)
        raise UsageError(f"no producer {'/'.join(names)[:200]!r}; nearest: {', '.join(near)}")
    seq = int(numbers[0])
    found = (
        _rows(reader, pairs, "seq = ?", [seq])
        if not sample
        else _rows(reader, pairs, "seq = ? AND sample_index = ?", [seq, int(numbers[1])])
    )
    ids = sorted(
        {TrajectoryId(r["region"], r["producer"], r["seq"], r["sample_index"] if sample else None) for r in found}
    )
    if len(ids) == 1:
        return ids[0]
    if ids:
        more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
        raise UsageError(f"{text[:200]!r} is not unique: {', '.join(map(str, ids[:_SHOWN]))}{more}")
    raise UsageError(
        f"no trajectory {text[:200]!r}; nearest: {', '.join(_nearest(reader, pairs, seq, sample)) or 'none'}"
    )


def _matching(there: list[tuple[str, str]], names: list[str]) -> list[tuple[str, str]]:
    """Those that the given beginnings fit; a name that is given whole means that one."""
    if not names:
        return there
    region, producer = names if len(names) == 2 else (None, names[0])
    kept = [pair for pair in there if region is None or encode_part(pair[0]).startswith(region)]
    kept = [pair for pair in kept if encode_part(pair[1]).startswith(producer)]
    whole = [p for p in kept if (region is None or encode_part(p[0]) == region) and encode_part(p[1]) == producer]
    return whole or kept


def _rows(reader: RunReader, pairs: list[tuple[str, str]], condition: str, values: list[Any]) -> list[dict[str, Any]]:
    regions, producers = ({pair[i] for pair in pairs} for i in (0, 1))
    found = reader.rows(
        f"SELECT DISTINCT region, producer, seq, sample_index FROM trajectories WHERE {condition}"
        " AND list_contains(?, region) AND list_contains(?, producer) LIMIT 10000",
        [*values, sorted(regions), sorted(producers)],
    )
    return [row for row in found if (row["region"], row["producer"]) in pairs]


def _nearest(reader: RunReader, pairs: list[tuple[str, str]], seq: int, sample: bool) -> list[str]:
    name = "id" if sample else "group_id"
    found = reader.rows(
        f"SELECT DISTINCT {name} AS name, abs(seq - ?) AS away FROM trajectories WHERE list_contains(?, producer)"
        f" AND list_contains(?, region) ORDER BY away, name LIMIT {_SHOWN}",
        [seq, sorted({p for _, p in pairs}), sorted({r for r, _ in pairs})],
    )
    return [row["name"] for row in found]
