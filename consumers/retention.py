"""What a recorder drops when the records of a run are larger than they may be. Pure.

Invariant: the oldest go first, trajectories and records of steps alike by their time; the newest file of every region stays. Held by
tests/unit/consumers/test_retention.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Record:
    """A recorded file, or the folder of a step's record. `until_ms`: Unix time of the newest thing in it; `region` "" for a step."""

    path: Path
    bytes: int
    until_ms: int
    region: str = ""


def to_drop(records: Sequence[Record], *, retain_bytes: int) -> list[Record]:
    """Oldest first, until the rest fits; empty with `retain_bytes` 0, which is everything."""
    total = sum(record.bytes for record in records)
    if not retain_bytes or total <= retain_bytes:
        return []
    newest: dict[str, Record] = {}
    for record in records:
        if record.region and (record.region not in newest or newest[record.region].until_ms < record.until_ms):
            newest[record.region] = record
    dropped = []
    for record in sorted(records, key=lambda one: (one.until_ms, str(one.path))):
        if total <= retain_bytes:
            break
        if newest.get(record.region) is not record:
            dropped.append(record)
            total -= record.bytes
    return dropped
