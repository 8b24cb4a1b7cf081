"""What goes when there is too much."""

from __future__ import annotations

from pathlib import Path

from anabranch.consumers.retention import Record, to_drop


def record(name: str, until_ms: int, region: str = "east", size: int = 10) -> Record:
    return Record(Path(name), size, until_ms, region)


def dropped(*records: Record, retain: int) -> list[str]:
    return [one.path.name for one in to_drop(records, retain_bytes=retain)]


def test_nothing_goes_while_there_is_room_or_without_a_bound():
    records = [record("a", 1), record("b", 2)]
    assert dropped(*records, retain=20) == []
    assert dropped(*records, retain=0) == []


def test_the_oldest_go_first_steps_among_them():
    records = [record("c", 3), record("a", 1), record("step", 2, region=""), record("d", 4)]
    assert dropped(*records, retain=20) == ["a", "step"]


def test_the_newest_of_every_region_stays():
    records = [
        record("east 1", 1),
        record("east 2", 2),
        record("west 1", 1, region="west"),
        record("step", 5, region=""),
    ]
    assert dropped(*records, retain=1) == ["east 1", "step"]
