"""Writes the record of every step beside the next step; one per rank.

Invariant: a record counts from the moment when its facts are there, and these are written by rank 0 when the files of all ranks
are durable. Recording never ends a run: what cannot be written, whatever the error, is given up, told once when it begins and
once when it is over, and the steps go on; a disk that is merely slow holds the learner up for `PATIENCE_S` a step at most. Memory: `WAITING`
records. Held by tests/unit/learner/test_step_recorder.py and
tests/process/test_step_record_kills.py.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Full, Queue

import pyarrow.parquet as pq
import structlog

from anabranch.learner.machine_facts import machine_facts
from anabranch.learner.record_order import RecordOrder
from anabranch.learner.step import UpdateFacts
from anabranch.learner.step_facts import step_facts
from anabranch.learner.step_observer import SeenUpdate
from anabranch.learner.step_rows import rank_rows
from anabranch.schemas.config import RunConfig
from anabranch.schemas.step_record import FACTS_FILE, rank_file, step_folder
from anabranch.transport.files import write_atomically

WAITING = 2
PATIENCE_S = 5.0  # of the loop, with a disk that does not keep up
OTHERS_S = 60.0  # how long rank 0 waits for the files of the other ranks
POLL_S = 0.1
CLOSE_S = 20.0
Note = tuple[str, dict[str, str | int | float]]


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """What a rank knows of a step when it is over. `updates`: all of the step; `seen`: those that came to an end."""

    order: RecordOrder
    updates: Sequence[UpdateFacts]
    seen: Sequence[SeenUpdate]
    lr: float
    time_ms: int
    step_s: float


@dataclass(frozen=True, slots=True)
class _Unfinished:
    """Rank 0: facts that wait for the other ranks."""

    folder: Path
    facts: bytes
    until_s: float


class StepRecorder:
    """Of rank `rank` of `config.learner.world_size`. `close` it: what was handed over is written first."""

    def __init__(self, config: RunConfig, rank: int = 0) -> None:
        self._config, self._rank = config, rank
        self._handed = Queue[RecordedStep | None](maxsize=WAITING)
        self._unfinished: list[_Unfinished] = []  # of the thread
        self._notes = Queue[Note]()
        self._lost = 0
        self._lock = threading.Lock()  # `_lost` is both threads'
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._run, name=f"step recorder {rank}", daemon=True)
        self._thread.start()

    def put(self, step: RecordedStep) -> None:
        """Have it written. Waits for at most `PATIENCE_S`, and gives the record up then."""
        try:
            self._handed.put(step, timeout=PATIENCE_S)
        except Full:
            self._give_up(step.order, f"the disk did not take earlier records for {PATIENCE_S:.0f} s")

    def look(self) -> list[Note]:
        """What there is to tell since the last call: (what, detail)."""
        found: list[Note] = []
        while True:
            try:
                found.append(self._notes.get_nowait())
            except Empty:
                return found

    def close(self) -> None:
        """Write what was handed over, for `CLOSE_S` at most."""
        end = time.monotonic() + CLOSE_S
        try:
            self._handed.put(None, timeout=CLOSE_S)
        except Full:
            self._log.warning("step records were not written at the end", records=self._handed.qsize())
            return
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            self._log.warning("step records were not written at the end", records=len(self._unfinished) or 1)

    # In the thread.

    def _run(self) -> None:
        ending = False
        while not (ending and not self._unfinished):
            try:
                step = self._handed.get(timeout=POLL_S if self._unfinished else None)
            except Empty:
                pass
            else:
                if step is None:
                    ending = True
                else:
                    self._write(step)
            self._finish()

    def _write(self, step: RecordedStep) -> None:
        order, first = step.order, self._rank == 0
        folder = self._config.run.directory / step_folder(order.epoch, order.version + 1)
        try:
            rows = rank_rows(order, step.updates, step.seen, first=first, tokens=self._config.recorder.tokens)
            sink = io.BytesIO()
            pq.write_table(rows, sink, compression="zstd")
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / rank_file(self._rank), sink.getvalue())
            if first:
                facts = step_facts(
                    self._config, order, step.updates, step.seen, machine_facts(self._config.learner.device),
                    lr=step.lr, time_ms=step.time_ms, step_s=step.step_s,
                )  # fmt: skip
                self._unfinished.append(_Unfinished(folder, facts.to_json(), time.monotonic() + OTHERS_S))
            else:
                self._written()
        except Exception as error:  # noqa: BLE001 - a thread that ends would hold up every step after it
            self._give_up(order, _said(error))

    def _finish(self) -> None:
        """Write the facts of the records that all ranks have done their part of."""
        waiting = []
        for one in self._unfinished:
            try:
                missing = [
                    r for r in range(1, self._config.learner.world_size) if not (one.folder / rank_file(r)).is_file()
                ]
                if missing and time.monotonic() < one.until_s:
                    waiting.append(one)
                elif missing:
                    self._trouble(one.folder, f"no file of ranks {missing} after {OTHERS_S:.0f} s")
                else:
                    write_atomically(one.folder / FACTS_FILE, one.facts)
                    self._written()
            except Exception as error:  # noqa: BLE001 - as in `_write`
                self._trouble(one.folder, _said(error))
        self._unfinished = waiting

    def _give_up(self, order: RecordOrder, why: str) -> None:
        self._trouble(self._config.run.directory / step_folder(order.epoch, order.version + 1), why)

    def _trouble(self, folder: Path, why: str) -> None:
        with self._lock:
            self._lost += 1
            begins = self._lost == 1
        if begins:
            self._log.warning("steps are not recorded", record=str(folder), error=why)
            self._notes.put(("steps not recorded", {"record": str(folder), "error": why}))

    def _written(self) -> None:
        with self._lock:
            lost, self._lost = self._lost, 0
        if lost:
            self._log.info("steps are recorded again", lost=lost)
            self._notes.put(("steps recorded again", {"lost": lost}))


def _said(error: Exception) -> str:
    """An error of the system says enough; of any other its kind is part of what it says."""
    return str(error) if isinstance(error, OSError) else repr(error)
