"""Looks after recorded files beside the recorder, in a thread of its own: settles, merges, drops.

Invariant: the recorder never waits for it but for the moment in which a merged file takes its name; what fails is told once and tried again at the
next turn; a turn reads and writes at most `TURN_BYTES` and what one file holds. Held by tests/unit/consumers/test_keeper.py and
tests/property/test_keeping.py.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import structlog

from anabranch.consumers import merging, retention, settling
from anabranch.consumers.fate_follower import FateFollower
from anabranch.consumers.parquet_writer import take_name, write_aside
from anabranch.consumers.recorded_files import RecordedFile, all_files, recorded_files, split
from anabranch.consumers.run_files import FilePart, RunFiles
from anabranch.consumers.step_records import record_bytes, recorded_steps
from anabranch.schemas.config import RecorderSection
from anabranch.schemas.errors import AnabranchError
from anabranch.schemas.fates import Identity
from anabranch.schemas.step_record import FACTS_FILE

TURN_S = 10.0
TURN_BYTES = 256 * 2**20
GRACE_S = 60.0  # how long the parts of a merged file stay for readers that have listed them
LOOK_BACK_S = 600.0  # so often the whole fate log is looked through for what was not found


class Keeper:
    """Of the run in `directory`. `naming`: held by whoever gives a recorded file its name."""

    def __init__(
        self,
        directory: Path,
        section: RecorderSection,
        *,
        naming: threading.Lock,
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._directory, self._section, self._naming = directory, section, naming
        self._clock, self._now_ms = clock, now_ms
        self._files, self._steps = RunFiles(directory), settling.StepRows(directory)
        self._covered: dict[Path, float] = {}  # parts of merged files, and since when they are known
        self._fates, self._looked_back_s = FateFollower(directory), clock()
        self._names: dict[Path, set[Identity]] = {}  # groups in the files that are not settled
        self._trouble = ""
        self._stopping = threading.Event()
        self._log = structlog.get_logger()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="keeper of recorded files", daemon=True)
        self._thread.start()

    def close(self, *, deadline_s: float = 30.0) -> None:
        """End the thread, and take a last turn: what is settled now need not be joined by every reader. Parts of merged files go at once."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(deadline_s)
            if self._thread.is_alive():
                return
        self.turn(last=True)

    def turn(self, *, last: bool = False) -> None:
        """Everything that is due, in bounded portions. Raises nothing that a disk or a file can do to it; what fails keeps nothing else
        from being done, dropping above all: a full disk is what it is for."""
        troubles = dict.fromkeys(
            filter(
                None, map(_failed, (self._settle, self._merge, lambda: self._remove_parts(at_once=last), self._retain))
            )
        )
        trouble = "; ".join(troubles)
        if trouble and trouble != self._trouble:  # else it was told
            self._log.warning("recorded files are left as they are for now", error=trouble, retry_s=TURN_S)
        self._trouble = trouble

    def _run(self) -> None:
        while not self._stopping.wait(TURN_S):
            self.turn()

    def _settle(self) -> None:
        waiting = [part for part in self._files.trajectories() if not part.settled and part.partitioned]
        if not waiting:
            return
        paths = {part.file.path for part in waiting}
        self._names = {path: names for path, names in self._names.items() if path in paths}
        for part in waiting:
            if part.file.path not in self._names:
                self._names[part.file.path] = settling.names_in(part.file)
        if self._clock() - self._looked_back_s >= LOOK_BACK_S:
            self._looked_back_s = self._clock()
            self._fates.look_back()
        fates = self._fates.find(set().union(*self._names.values()))
        room = TURN_BYTES
        for part in waiting:
            if room > 0 and self._names[part.file.path] <= fates.keys():
                room -= part.file.path.stat().st_size
                if settling.settle(part.file, fates, self._steps, now_ms=self._now_ms()):
                    self._log.debug("settled", file=part.file.path.name)

    def _merge(self) -> None:
        room = TURN_BYTES
        while room > 0:
            parts = merging.to_merge(
                [_weighed(part) for part in self._files.trajectories()], target_bytes=self._section.merge_bytes
            )
            if not parts:
                return
            table, path = merging.merge(parts), merging.merged_path(parts)
            room -= table.nbytes
            aside = write_aside(table, path)
            with self._naming:
                if not merging.still_alone(parts, recorded_files(self._root)):
                    aside.unlink()
                    return
                take_name(aside, path)
            self._log.debug("merged", file=path.name, parts=len(parts), rows=table.num_rows)

    def _remove_parts(self, *, at_once: bool = False) -> None:
        covered = {file.path for file in split(all_files(self._root))[1]}
        self._covered = {path: self._covered.get(path, self._clock()) for path in covered}
        for path, since in list(self._covered.items()):
            if at_once or self._clock() - since >= GRACE_S:
                path.unlink(missing_ok=True)
                del self._covered[path]

    def _retain(self) -> None:
        if not self._section.retain_bytes:
            return
        records = [_file_record(file) for file in recorded_files(self._root)]
        for place in recorded_steps(self._directory):
            facts = place.folder / FACTS_FILE
            records.append(retention.Record(place.folder, record_bytes(place), facts.stat().st_mtime_ns // 1_000_000))
        dropped = retention.to_drop(records, retain_bytes=self._section.retain_bytes)
        if any(record.region for record in dropped):
            self._remove_parts(at_once=True)  # else they would count again without the one that was merged of them
        for record in dropped:
            if record.region:
                record.path.unlink(missing_ok=True)
            else:
                (record.path / FACTS_FILE).unlink(missing_ok=True)  # first: what has none does not count
                shutil.rmtree(record.path)
            what = str(record.path.relative_to(self._directory))
            self._log.info(
                "dropped for want of space", record=what, bytes=record.bytes, retain_bytes=self._section.retain_bytes
            )

    @property
    def _root(self) -> Path:
        return self._directory / "trajectories"


def _failed(act: Callable[[], None]) -> str:
    """Why, "" if it did not."""
    try:
        act()
    except (OSError, pa.ArrowException, AnabranchError) as error:
        return str(error) or type(error).__name__
    return ""


def _weighed(part: FilePart) -> merging.Weighed:
    try:
        size = part.file.path.stat().st_size
    except FileNotFoundError:
        size = 0
    return merging.Weighed(part.file, size, part.settled)


def _file_record(file: RecordedFile) -> retention.Record:
    return retention.Record(file.path, file.path.stat().st_size, file.last[0], file.partition.region)
