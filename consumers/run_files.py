"""The files of a run directory that a reader of recorded trajectories looks at: where they are, and what is in their footers.

Invariant: a listing names only what is whole at that moment (files are written aside and renamed; a step's record counts once
its facts are there). A footer is read once for each content of a file: one that was written over is looked at again. Held by
tests/unit/consumers/test_run_reader.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.consumers.fate_files import FATES_DIRECTORY, fate_files
from anabranch.consumers.recorded_files import TRAJECTORIES_DIRECTORY, RecordedFile, recorded_files
from anabranch.consumers.step_records import StepPlace, recorded_steps
from anabranch.schemas.errors import TrajectoryError
from anabranch.schemas.step_record import STEPS_DIRECTORY
from anabranch.schemas.version_record import VERSIONS_FILE
from anabranch.transport.metrics_log import METRICS_FILE

_MARKS = (
    TRAJECTORIES_DIRECTORY,
    STEPS_DIRECTORY,
    FATES_DIRECTORY,
    METRICS_FILE,
    VERSIONS_FILE,
    "resolved.toml",
    "config.toml",
)


@dataclass(frozen=True, slots=True)
class FilePart:
    """A recorded file with what its footer says. `settled`: every row has its fate, and so everything that is joined."""

    file: RecordedFile
    columns: frozenset[str]
    settled: bool

    @property
    def partitioned(self) -> bool:
        return self.file.partition.run is not None


@dataclass(slots=True)
class RunFiles:
    """What is in `directory`, as `list` last found it. Not for several threads at once."""

    directory: Path
    _footers: dict[Path, tuple[tuple[int, int, int], frozenset[str], bool]] = field(default_factory=dict)
    _whole: dict[Path, tuple[Path, ...]] = field(default_factory=dict)

    def trajectories(self) -> list[FilePart]:
        """Raises OSError."""
        parts: list[FilePart] = []
        for file in recorded_files(self.directory / TRAJECTORIES_DIRECTORY):
            if (footer := self._footer(file.path)) is not None:
                parts.append(FilePart(file, *footer))
        alive = {part.file.path for part in parts}
        for path in [path for path in self._footers if path not in alive]:
            del self._footers[path]
        return parts

    def fates(self) -> list[Path]:
        return [path for _, path in fate_files(self.directory / FATES_DIRECTORY)]

    def metrics(self) -> list[Path]:
        return [path] if (path := self.directory / METRICS_FILE).is_file() else []

    def versions(self) -> list[Path]:
        return [path] if (path := self.directory / VERSIONS_FILE).is_file() else []

    def steps(self) -> list[StepPlace]:
        """Whole records of steps, sorted."""
        return recorded_steps(self.directory)

    def ranks(self) -> list[Path]:
        """The per-rank files of whole records."""
        places = [place.folder for place in self.steps()]
        self._whole = {folder: self._whole.get(folder) or tuple(folder.glob("rank-*.parquet")) for folder in places}
        return [path for paths in self._whole.values() for path in paths]

    def _footer(self, path: Path) -> tuple[frozenset[str], bool] | None:
        try:
            stat = path.stat()
            seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            known = self._footers.get(path)
            if known is None or known[0] != seen:
                metadata = pq.read_metadata(path)
                known = seen, frozenset(metadata.schema.to_arrow_schema().names), _settled(metadata)
                self._footers[path] = known
        except FileNotFoundError:  # merged or dropped since it was listed: the next listing has its heir
            return None
        except (pa.ArrowException, OSError) as error:
            raise TrajectoryError(f"{path} cannot be read: {error}; if it is damaged, move it away") from error
        return known[1:]


def is_run_directory(path: Path) -> bool:
    return any((path / mark).exists() for mark in _MARKS)


def _settled(metadata: pq.FileMetaData) -> bool:
    """By the counts of nulls in `fate` that the footer holds; without them, no."""
    schema = metadata.schema
    at = next((i for i in range(len(schema)) if schema.column(i).path == "fate"), None)
    if at is None:
        return False
    groups = (metadata.row_group(i).column(at).statistics for i in range(metadata.num_row_groups))
    return all(s is not None and s.has_null_count and s.null_count == 0 for s in groups)
