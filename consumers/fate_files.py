"""The files of a fate log, as anybody may read them: RUN_DIRECTORY/fates/000001.jsonl, 000002.jsonl, ...

Invariant: a line counts once its newline is there; reading changes nothing and takes a log that is being written. A closed
file has its counts beside it (000001.counts.json), so that a long log is not read again at every start.
Held by tests/unit/consumers/test_fate_log.py.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from anabranch.schemas.errors import TrajectoryError
from anabranch.schemas.fates import FateRecord, parse_fate
from anabranch.transport.files import write_atomically

FATES_DIRECTORY = "fates"
_NAME = re.compile(r"(\d{6,})\.jsonl\Z")

Counts = dict[str, Counter[str]]  # region -> fate -> groups


def fate_files(directory: Path) -> list[tuple[int, Path]]:
    """(number, file), oldest first; empty when there is no such folder."""
    found = [(int(match[1]), path) for path in directory.glob("*.jsonl") if (match := _NAME.match(path.name))]
    return sorted(found)


def file_name(number: int) -> str:
    return f"{number:06}.jsonl"


def whole_lines(path: Path) -> list[bytes]:
    """Lines that end with a newline, without it."""
    return path.read_bytes().split(b"\n")[:-1]


def parse_lines(lines: list[bytes]) -> Iterator[FateRecord]:
    """The readable ones: damage of one line costs that line."""
    for line in lines:
        try:
            yield parse_fate(line)
        except TrajectoryError:
            continue


def read_fates(directory: Path) -> Iterator[FateRecord]:
    """Every readable record of the log in `directory`, oldest first. Raises OSError."""
    for _, path in fate_files(directory):
        yield from parse_lines(whole_lines(path))


def count_fates(directory: Path) -> Counts:
    """Groups by region and fate. Raises OSError."""
    total: Counts = {}
    files = fate_files(directory)
    for _, path in files:
        closed = path != files[-1][1]
        add_counts(total, (closed and _read_counts(path)) or counts_of(parse_lines(whole_lines(path))))
    return total


def counts_of(records: Iterator[FateRecord]) -> Counts:
    counts: Counts = {}
    for record in records:
        counts.setdefault(record.region, Counter())[record.fate] += 1
    return counts


def add_counts(total: Counts, more: Counts) -> None:
    for region, fates in more.items():
        total.setdefault(region, Counter()).update(fates)


def close_file(path: Path) -> None:
    """Leave the counts of a file that grows no more beside it. Raises OSError."""
    counts = counts_of(parse_lines(whole_lines(path)))
    write_atomically(_counts_path(path), json.dumps({"bytes": path.stat().st_size, "fates": counts}).encode())


def _read_counts(path: Path) -> Counts | None:
    """What `close_file` left, None if it is not there or is of other content."""
    try:
        stored = json.loads(_counts_path(path).read_bytes())
        if stored["bytes"] != path.stat().st_size:
            return None
        return {
            region: Counter({fate: int(number) for fate, number in fates.items()})
            for region, fates in stored["fates"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _counts_path(path: Path) -> Path:
    return path.with_suffix(".counts.json")
