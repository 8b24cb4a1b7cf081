"""What lies in a spool's folder: the segments of one producer, joined, and their records.

Invariant: the numbers of the joined segments are consecutive. A number whose record is nowhere is kept as missing; where two
files claim a number the later file wins, since what it begins with was never reported as put in the earlier one. Reading
changes nothing, so it may go on beside the process that writes. Held by tests/unit/producers/test_spool.py.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import structlog

from anabranch.producers.spool_file import LONGEST_GAP, SUFFIX, Segment, parse_name, read_payloads, scan
from anabranch.schemas.errors import SpoolError


def spool_folders(spool_directory: Path) -> list[Path]:
    """The folders of all spools (REGION/SLOT) under `config.spool_directory`."""
    return sorted({path.parent for path in spool_directory.glob(f"*/*/*{SUFFIX}")})


def spool_exists(folder: Path) -> bool:
    return any(True for _ in folder.glob(f"*{SUFFIX}"))


def read_spool(folder: Path) -> Iterator[tuple[str, int, int, bytes]]:
    """(producer, seq, group index, payload) of every whole record in a spool's folder, ascending, without changing
    anything: of a spool that a process writes (a segment that it removes meanwhile is passed over) or left behind.

    Raises SpoolError or SchemaVersionError: a file there is none of ours."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        producer, _ = parse_name(path)
        try:
            segment = scan(path)
        except FileNotFoundError:
            continue
        for seq in range(segment.first_seq, segment.end_seq):
            for _, group_index, payload in read_payloads(segment, seq, 1):
                if isinstance(payload, bytes):
                    yield producer, seq, group_index, payload


def load_segments(folder: Path) -> tuple[str, list[Segment]]:
    """The producer whose spool lies in `folder`, and its segments, for the process that goes on with it: what a killed one
    left half done is removed. Damage is told in the log.

    Raises:
        SpoolError: there is no spool, or those of several producers, or files that are none of ours.
        SchemaVersionError: another program version wrote it.
        OSError: it cannot be read.
    """
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    producers = sorted({parse_name(path)[0] for path in paths})
    if len(producers) != 1:
        raise SpoolError(f"{folder} holds the spools of {', '.join(producers) or 'nobody'}; expected one producer")
    segments: list[Segment] = []
    for path in paths:
        _join(segments, scan(path))
    last = segments[-1]
    with contextlib.suppress(OSError):  # else before the next write
        if os.path.getsize(last.path) > last.size:
            os.truncate(last.path, last.size)
    for segment in segments:
        for what in segment.damage:
            structlog.get_logger().error("a spool's file is damaged", path=str(segment.path), damage=what)
    return producers[0], segments


def _join(segments: list[Segment], segment: Segment) -> None:
    if segments:
        before = segments[-1]
        if segment.first_seq > before.end_seq + LONGEST_GAP:
            raise SpoolError(f"{segment.path} begins {segment.first_seq - before.end_seq} numbers behind {before.path}")
        before.cut(segment.first_seq)
        if segment.first_seq > before.end_seq:
            before.damage.append(f"records {before.end_seq} to {segment.first_seq - 1} are missing")
            before.miss(segment.first_seq)
    segments.append(segment)
