"""What `metrics.jsonl` says, read while it is still being written.

Invariant: a line counts once and only when it is complete; a torn or unknown line costs that line alone, and never
an error. Of a step that was done twice (a learner that restarted from a checkpoint) the later record counts.
Held by tests/unit/deploy/test_history.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from anabranch.schemas.metrics import EvaluationRecord, NoteRecord, StepRecord
from anabranch.transport.metrics_log import parse_record


@dataclass
class History:
    """Records in order. `steps` maps the step number to its latest record, ascending."""

    steps: dict[int, StepRecord] = field(default_factory=dict)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    notes: list[NoteRecord] = field(default_factory=list)
    unreadable_lines: int = 0

    def add(self, record: StepRecord | EvaluationRecord | NoteRecord) -> None:
        match record:
            case StepRecord():
                while self.steps and (newest := next(reversed(self.steps))) >= record.step:
                    del self.steps[newest]
                self.steps[record.step] = record
            case EvaluationRecord():
                self.evaluations.append(record)
            case NoteRecord():
                self.notes.append(record)

    @property
    def last(self) -> StepRecord | None:
        return next(reversed(self.steps.values()), None)

    @property
    def before(self) -> EvaluationRecord | None:
        """The first held-out evaluation."""
        return self.evaluations[0] if self.evaluations else None

    @property
    def after(self) -> EvaluationRecord | None:
        """The last held-out evaluation, if it is of later weights than the first."""
        first, last = self.before, self.evaluations[-1] if self.evaluations else None
        return last if first is not None and last is not None and last.version > first.version else None


class MetricsTail:
    """Follows one `metrics.jsonl`, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.history = History()
        self._offset = 0
        self._torn = b""

    def poll(self) -> list[StepRecord | EvaluationRecord | NoteRecord]:
        """Records completed since the last call; they are in `history` too. A file that shrank is read afresh."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset, self._torn, self.history = 0, b"", History()
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._torn = (self._torn + data).split(b"\n")
        records = []
        for line in lines:
            if not line.strip():
                continue
            record = parse_record(line.decode("utf-8", "replace"))
            if record is None:
                self.history.unreadable_lines += 1
            else:
                records.append(record)
                self.history.add(record)
        return records


def read_history(path: Path) -> History:
    """All complete records of a `metrics.jsonl`. Raises FileNotFoundError."""
    if not path.exists():
        raise FileNotFoundError(path)
    tail = MetricsTail(path)
    tail.poll()
    return tail.history
