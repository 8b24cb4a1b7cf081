"""Copies a run into an object store beside the recorder, in a thread of its own, and drops there what `recorder.retain_bytes` leaves no room for.

Invariant: the recorder never waits for it; a store that is away costs nothing but the copy, which goes on where it was, also after a kill -9.
An object is whole, a step's facts come after the rest of it, a log ends with a whole line, and a file that was merged is there before its
parts go: whoever reads the store finds rows once. A turn moves at most `TURN_BYTES` and one file, of which two parts are in memory. Held by
tests/unit/consumers/test_store_copier.py and tests/contract/test_run_in_store.py.

    URL/RUN/trajectories/..., URL/RUN/steps/..., URL/RUN/fates/..., URL/RUN/metrics.jsonl, versions.jsonl, resolved.toml
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

import structlog

from anabranch.consumers.fate_files import FATES_DIRECTORY, fate_files
from anabranch.consumers.run_copy import Held, Unit, lacking, plan
from anabranch.consumers.run_files import RunFiles
from anabranch.schemas.config import RecorderSection
from anabranch.schemas.errors import AnabranchError, ConfigError
from anabranch.schemas.step_record import FACTS_FILE
from anabranch.schemas.version_record import VERSIONS_FILE
from anabranch.transport.metrics_log import METRICS_FILE
from anabranch.transport.object_store import PART_BYTES, ObjectStore, Place

TURN_S = 10.0
TURN_BYTES = 256 * 2**20
LIST_S = 600.0  # so often the store is asked what it has; between that we know what we did
GRACE_S = 600.0  # how long parts of a merged file stay in the store: a reader fetches what it has listed
UNSETTLED_S = 900.0  # a file that still waits for fates after so long is copied as it is, and again when it has them
LOG_S = 60.0  # a log that grows is copied whole, at most so often,
LOG_BYTES_PER_S = 2**20  # and no faster than that
NO_PROGRESS_S = 30.0  # at the end of a run: how long a store that takes nothing is waited for
DEADLINE_S = 30.0
_PLACE = Place("the recorder's store", "recorder.store", "recorder.retain_bytes")
_ALONE = ("resolved.toml", METRICS_FILE, VERSIONS_FILE)
_Seen = tuple[int, int, int]  # inode, time of change in ns, bytes


def open_run_store(url: str, *, directory: Path, run: str, options: dict[str, str]) -> ObjectStore:
    """Raises ConfigError: the URL or an option is not usable, or the store is the run directory itself."""
    if url.startswith("file://") and (Path(unquote(urlsplit(url).path)) / run).resolve() == directory.resolve():
        raise ConfigError(f"recorder.store {url} is where the run directory {directory} is: a copy belongs elsewhere")
    return ObjectStore(url, _PLACE, options=options, deadline_s=DEADLINE_S, aside=f"{run}/aside")


class StoreCopier:
    """Of the run in `directory`, to names that begin with `run`/."""

    def __init__(
        self,
        directory: Path,
        store: ObjectStore,
        section: RecorderSection,
        *,
        run: str,
        clock: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._directory, self._store, self._section, self._prefix = directory, store, section, f"{run}/"
        self._clock, self._wall_s = clock, wall_s
        self._files = RunFiles(directory)
        self._there: dict[str, Held] = {}
        self._listed_s: float | None = None
        self._logs: dict[str, tuple[_Seen, float]] = {}  # as it was when it was copied, and when
        self._idle: dict[str, float] = {}  # names in the store that do not count, and since when they are known
        self._given_up: frozenset[str] = frozenset()
        self._trouble = ""
        self.bytes_copied = 0
        self._stopping = threading.Event()
        self._log = structlog.get_logger()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="copy of the run to its store", daemon=True)
        self._thread.start()

    def close(self, *, alive: Callable[[], object], hurry: Callable[[], bool]) -> None:
        """End the thread, and copy what is left, unsettled files too, until all is there, the store has taken nothing for
        `NO_PROGRESS_S`, or `hurry()`, which still allows one turn.

        Args:
            alive: called between turns, for a watchdog.
        """
        self._stopping.set()
        if self._ended(alive) and self._finished(alive, hurry):
            return
        self._log.warning(
            "not all of the run is in its store; the next recorder of this run copies the rest", error=self._trouble
        )

    def _ended(self, alive: Callable[[], object]) -> bool:
        """Whether the thread, which may be waiting for the store, ends within `NO_PROGRESS_S`."""
        end_s = self._clock() + NO_PROGRESS_S
        while self._thread is not None and self._thread.is_alive():
            alive()
            if self._clock() > end_s:
                return False
            self._thread.join(2.0)
        return True

    def _finished(self, alive: Callable[[], object], hurry: Callable[[], bool]) -> bool:
        moved_s, moved = self._clock(), self.bytes_copied
        while not self.turn(last=True):
            alive()
            if self.bytes_copied > moved:
                moved_s, moved = self._clock(), self.bytes_copied
            if hurry() or self._clock() - moved_s > NO_PROGRESS_S:
                return False
            if self._trouble:
                time.sleep(1.0)
        return True

    def turn(self, *, last: bool = False) -> bool:
        """Copy what is due; whether all is in the store that is ready for it. Raises nothing that a store or a disk can do to it."""
        try:
            done = self._turn(last)
        except (OSError, AnabranchError) as error:
            if str(error) != self._trouble:  # else it was told
                self._log.warning("the run is not copied to its store for now", error=str(error), retry_s=TURN_S)
            self._trouble, self._listed_s = str(error), None
            return False
        if self._trouble:
            self._log.info("the run is copied to its store again")
        self._trouble = ""
        return done

    def _run(self) -> None:
        while not self._stopping.wait(TURN_S):
            self.turn()

    def _turn(self, last: bool) -> bool:
        self._look()
        self._copy_logs(last)
        here, room = self._here(last), TURN_BYTES
        due = plan(here, self._there, retain_bytes=self._section.retain_bytes, given_up=self._given_up)
        self._given_up = due.given_up
        for unit in due.copy:
            if room <= 0 or (self._stopping.is_set() and not last):
                return False
            room -= self._copy(lacking(unit, here, self._there))
        if due.drop:
            self._remove(sorted(due.idle))  # else parts would count again without the one that was merged of them
        self._drop(due.drop)
        self._remove_idle(due.idle & self._there.keys())
        return True

    def _look(self) -> None:
        """What the store has, now and then: another may have looked after it."""
        if self._listed_s is not None and self._clock() - self._listed_s < LIST_S:
            return
        self._store.make()
        self._there = {
            one.path.removeprefix(self._prefix): Held(one.bytes, int(one.changed_s * 1000))
            for one in self._store.list(self._prefix.rstrip("/"))
        }
        self._listed_s = self._clock()

    def _here(self, last: bool) -> dict[str, Held]:
        """Recorded files that are settled, or too old to wait for it, and whole records of steps."""
        found: dict[str, Held] = {}
        old_ms = 0 if last else int((self._wall_s() - UNSETTLED_S) * 1000)
        for part in self._files.trajectories():
            held = _held(part.file.path)
            if held is not None and (last or part.settled or not part.partitioned or held.changed_ms < old_ms):
                found[self._name(part.file.path)] = held
        for place in self._files.steps():
            ranks = sorted(place.folder.glob("rank-*.parquet"))
            files = {path: _held(path) for path in (*ranks, place.folder / FACTS_FILE)}
            found |= {self._name(path): held for path, held in files.items() if held is not None}
        return found

    def _copy(self, names: list[str]) -> int:
        """Files of one unit, in order; stops at one that was dropped meanwhile. Returns their bytes."""
        total = 0
        for name in names:
            try:
                with (self._directory / name).open("rb") as file:
                    total += self._put(name, file, os.fstat(file.fileno()).st_size)
            except FileNotFoundError:
                break
        return total

    def _put(self, name: str, file: BinaryIO, size: int) -> int:
        content = file.read(size) if size <= PART_BYTES else _pieces(file, size)
        self._store.put(self._prefix + name, content)
        self._there[name] = Held(size, int(self._wall_s() * 1000))
        self.bytes_copied += size
        return size

    def _copy_logs(self, last: bool) -> None:
        numbered = [path for _, path in fate_files(self._directory / FATES_DIRECTORY)]
        closed = {self._name(path) for path in numbered[:-1]}
        for path in (*(self._directory / name for name in _ALONE), *numbered):
            name = self._name(path)
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            before, at_s = self._logs.get(name, (None, 0.0))
            if before == seen or (
                before is None and name in closed and _same_size(self._there.get(name), stat.st_size)
            ):
                continue
            pause_s = max(LOG_S, stat.st_size / LOG_BYTES_PER_S)
            if last or before is None or self._clock() - at_s >= pause_s:
                with path.open("rb") as file:
                    self._put(name, file, _whole_lines(file) if path.suffix == ".jsonl" else stat.st_size)
                self._logs[name] = seen, self._clock()

    def _drop(self, units: list[Unit]) -> None:
        for unit in units:
            # a step without its facts does not count: they go first
            for name in reversed(unit.names):
                self._remove([name])
            self._log.info(
                "dropped from the store for want of space",
                record=unit.key, bytes=unit.bytes, retain_bytes=self._section.retain_bytes,
            )  # fmt: skip

    def _remove_idle(self, idle: set[str]) -> None:
        self._idle = {name: self._idle.get(name, self._clock()) for name in idle}
        self._remove([name for name, since in self._idle.items() if self._clock() - since >= GRACE_S])

    def _remove(self, names: list[str]) -> None:
        if names:
            self._store.delete([self._prefix + name for name in names])
        for name in names:
            self._there.pop(name, None)
            self._idle.pop(name, None)

    def _name(self, path: Path) -> str:
        return path.relative_to(self._directory).as_posix()


def _held(path: Path) -> Held | None:
    try:
        stat = path.stat()
    except FileNotFoundError:  # merged or dropped since it was listed
        return None
    return Held(stat.st_size, stat.st_mtime_ns // 1_000_000)


def _same_size(held: Held | None, size: int) -> bool:
    return held is not None and held.bytes == size


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    left = size
    while left and (piece := file.read(min(left, PART_BYTES))):
        left -= len(piece)
        yield piece


def _whole_lines(file: BinaryIO) -> int:
    """Bytes up to the last newline; the file stands at its beginning afterwards."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 2**16)
        file.seek(start)
        at = file.read(end - start).rfind(b"\n")
        if at >= 0:
            end = start + at + 1
            break
        end = start
    file.seek(0)
    return end
