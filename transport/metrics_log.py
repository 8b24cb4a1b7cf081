"""`metrics.jsonl`: what a run reports, one JSON object a line.

Invariant: a line is written by one append, so a reader sees whole lines. One that was torn (the machine died, the disk
was full) is ended before the next, and `read_records` passes over it. Held by tests/unit/transport/test_metrics_log.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from anabranch.schemas.metrics import AnyRecord, EvaluationRecord, NoteRecord, Record, StepRecord

METRICS_FILE = "metrics.jsonl"
_ANY: TypeAdapter[StepRecord | EvaluationRecord | NoteRecord] = TypeAdapter(AnyRecord)


class MetricsLog:
    """Appends records to `directory`/metrics.jsonl, creating the directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / METRICS_FILE
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._torn = False
        self._end_torn_line()

    def _end_torn_line(self) -> None:
        size = os.fstat(self._fd).st_size
        if size:
            with self.path.open("rb") as file:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    os.write(self._fd, b"\n")

    def append(self, record: Record) -> None:
        """Raises OSError (disk full, for example): the record is not in the file then."""
        line = (record.model_dump_json(exclude_none=True) + "\n").encode()
        if self._torn:
            self._end_torn_line()
            self._torn = False
        written = os.write(self._fd, line)
        if written < len(line):
            self._torn = True
            raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes of a record fitted", str(self.path))

    def sync(self) -> None:
        """What was appended outlives the machine when this returns. Raises OSError."""
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def parse_record(line: str) -> StepRecord | EvaluationRecord | NoteRecord | None:
    """The record in `line`, or None if it is not a whole one."""
    try:
        return _ANY.validate_json(line)
    except ValidationError:
        return None


def read_records(path: Path) -> Iterator[StepRecord | EvaluationRecord | NoteRecord]:
    """Every readable record of a metrics file, in order. Raises FileNotFoundError."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            record = parse_record(line)
            if record is not None:
                yield record
