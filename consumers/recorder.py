"""`anabranch record`: streams to Parquet, through a consumer group of its own.

Invariant: an entry is acknowledged to the recorder's group only after the file that holds it is durable; entries
delivered again after a crash are recognised on disk, and a group that comes again under another entry id (a server that
forgot it, a copy) by its producer and seq, of which the newest `REMEMBERED` of a region are known. A region that is away or refuses us, or a full disk, never stops the
other regions, and never the learner (whose group is another); when all regions refuse us, it ends. Held by
tests/unit/consumers/test_recorder.py, tests/unit/consumers/test_recorder_outages.py, tests/property/test_recording.py,
tests/process/test_record_command.py and tests/process/test_record_kills.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from anabranch.consumers.keeper import Keeper
from anabranch.consumers.parquet_writer import newest_names, recorded, remove_leftovers, write_entries
from anabranch.consumers.recorded_files import Partition, id_key
from anabranch.consumers.recorded_rows import Entry, Name, named, partition_of
from anabranch.schemas.config import RunConfig
from anabranch.schemas.envelope import open_envelope
from anabranch.schemas.errors import (
    AnabranchError,
    BackpressureError,
    DeadlineError,
    StreamUnavailableError,
    TemporaryError,
    WireError,
)
from anabranch.schemas.keys import RECORDER_GROUP
from anabranch.schemas.trajectory import read_batch
from anabranch.transport.log import setup_logging
from anabranch.transport.runtime import StopSignal, run_service, sd_notify
from anabranch.transport.stream import Delivery, TrajectoryStream
from anabranch.transport.wiring import connect_hub, connect_regions

if TYPE_CHECKING:
    from anabranch.consumers.store_copier import StoreCopier

CONSUMER = "recorder-0"
QUIET_POLLS_TO_END = 3
RETRY_S = 2.0
REFUSED_S = 30.0  # a person must mend that, and the server logs each refusal
REMEMBERED = 20_000  # groups of a region; far more than a server can forget in its last second
NOT_NOW = (StreamUnavailableError, BackpressureError)  # a region is away or takes no writes


@dataclass(slots=True)
class _Region:
    name: str
    stream: TrajectoryStream
    resume_after: str | None = "0-0"  # None once what was pending before a restart is read
    buffer: list[Entry] = field(default_factory=list)
    rows: int = 0  # in the buffer
    bytes: int = 0  # of these rows in memory
    skipped: list[str] = field(default_factory=list)  # unreadable or already on disk: acknowledged with the next file
    since_s: float = 0.0
    retry_at_s: float = 0.0
    error: str = ""  # of the last attempt, if it failed
    refused: AnabranchError | None = None  # that attempt's error, if a person must mend it
    known: dict[Name, None] = field(default_factory=dict)  # buffered or on disk, oldest first


class Recorder:
    def __init__(
        self,
        streams: Mapping[str, TrajectoryStream],
        directory: Path,
        config: RunConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        naming: threading.Lock | None = None,
    ) -> None:
        """`naming`: held while a file gets its name, as by a `Keeper` of the same directory."""
        self._naming = naming or threading.Lock()
        self._regions = [_Region(name, stream) for name, stream in sorted(streams.items())]
        self._directory, self._config, self._clock = directory, config, clock
        self.rows_written = self.files_written = 0
        self._log = structlog.get_logger()
        remove_leftovers(directory)
        for region in self._regions:
            region.known = dict.fromkeys(newest_names(directory, region.name, REMEMBERED))

    def poll(self) -> int:
        """One round: read what is new, write the files that are due. Returns how many entries were read.

        Raises AnabranchError: every region refuses us (credentials, a key of the wrong type); names each.
        """
        entries = 0
        due_regions = [r for r in self._regions if self._clock() >= r.retry_at_s]
        if not due_regions:
            time.sleep(0.05)
        for region in due_regions:
            try:
                entries += self._read(region)
                due = self._clock() - region.since_s >= self._config.recorder.seconds_per_file
                if self._full(region) or ((region.buffer or region.skipped) and due):
                    self._write(region)
            except (AnabranchError, OSError) as error:  # OSError: our disk is full
                self._pause(region, error)
            else:
                region.error, region.refused = "", None
        refused = [r.refused for r in self._regions if r.refused is not None]
        if refused and len(refused) == len(self._regions):
            kinds = {type(error) for error in refused}
            kind = kinds.pop() if len(kinds) == 1 else AnabranchError
            raise kind("; ".join(f"region {r.name}: {r.error}" for r in self._regions)) from refused[0]
        return entries

    def _pause(self, region: _Region, error: AnabranchError | OSError) -> None:
        refused = isinstance(error, AnabranchError) and not isinstance(error, NOT_NOW)
        region.refused = error if refused else None
        pause_s = REFUSED_S if refused else RETRY_S
        if region.error != str(error):  # else it was told
            tell = self._log.error if refused else self._log.warning
            tell("recording paused", region=region.name, error=str(error), retry_s=pause_s)
        region.retry_at_s, region.error = self._clock() + pause_s, str(error)

    def paused(self) -> dict[str, str]:
        """Region -> why, for those whose last attempt failed."""
        return {r.name: r.error for r in self._regions if r.error}

    def flush(self) -> None:
        """Write what is buffered, whatever its age, in every region that can be written. Raises TemporaryError when one
        could not be; its entries stay pending, and the next recorder finds them."""
        failed: list[str] = []
        for region in self._regions:
            try:
                self._write(region)
            except (AnabranchError, OSError) as error:
                failed.append(f"region {region.name}: {error}")
        if failed:
            raise TemporaryError(f"not everything is recorded: {'; '.join(failed)}")

    @property
    def buffered(self) -> int:
        return sum(len(r.buffer) + len(r.skipped) for r in self._regions)

    def _full(self, region: _Region) -> bool:
        section = self._config.recorder
        return region.rows >= section.rows_per_file or region.bytes >= section.bytes_per_file

    def _read(self, region: _Region) -> int:
        if self._full(region):
            return 0  # the last write failed: read no more until it succeeds
        block_ms = max(1, self._config.stream.block_ms // len(self._regions))
        found: list[Delivery] = []
        on_disk: set[str] = set()
        if region.resume_after is not None:
            found = region.stream.read_own_pending(
                RECORDER_GROUP, CONSUMER, max_entries=64, after_id=region.resume_after
            )
            on_disk = recorded(self._directory, region.name, filter(None, map(_delivered, found)))
            region.resume_after = found[-1].entry_id if found else None
            region.skipped += sorted(on_disk, key=id_key)
        if not found:
            found = region.stream.read(RECORDER_GROUP, CONSUMER, max_entries=64, block_ms=block_ms)
        for delivery in found:
            if delivery.entry_id not in on_disk:
                self._take(region, delivery)
        return len(found)

    def _take(self, region: _Region, delivery: Delivery) -> None:
        try:
            envelope = open_envelope(delivery.fields, max_entry_bytes=self._config.stream.max_entry_bytes)
            batch = read_batch(envelope.payload)
        except WireError as error:  # the learner's reader puts it among the dead letters
            self._log.warning("entry not recorded", region=region.name, entry=delivery.entry_id, error=str(error))
            region.skipped.append(delivery.entry_id)
            return
        if (run := batch.column("run")[0].as_py()) != self._config.run.name:  # as the learner's reader sees it
            self._log.warning(
                "entry not recorded", region=region.name, entry=delivery.entry_id, error=f"it is of run {run[:100]!r}"
            )
            region.skipped.append(delivery.entry_id)
            return
        entry = Entry(delivery.entry_id, envelope.seq, named(batch, envelope.producer))
        if entry.name in region.known:
            if delivery.entry_id not in (e.entry_id for e in region.buffer):
                region.skipped.append(delivery.entry_id)
            return
        region.known[entry.name] = None
        while len(region.known) > max(REMEMBERED, len(region.buffer) + 1):
            del region.known[next(iter(region.known))]
        if not region.buffer:
            region.since_s = self._clock()
        region.buffer.append(entry)
        region.rows += batch.num_rows
        region.bytes += batch.nbytes

    def _write(self, region: _Region) -> None:
        parts: dict[Partition, list[Entry]] = {}
        for entry in region.buffer:
            parts.setdefault(partition_of(entry, run=self._config.run.name, region=region.name), []).append(entry)
        for partition, entries in parts.items():
            with self._naming:
                path = write_entries(self._directory, partition, entries)
            ids, rows = [entry.entry_id for entry in entries], sum(entry.rows.num_rows for entry in entries)
            self._log.debug("recorded", file=path.name, rows=rows)
            self.rows_written += rows
            self.files_written += 1
            region.rows -= rows
            region.bytes -= sum(entry.rows.nbytes for entry in entries)
            region.skipped += ids  # another partition may fail: these are on disk
            region.buffer = [entry for entry in region.buffer if entry.entry_id not in set(ids)]
        if region.skipped:
            region.stream.settle(RECORDER_GROUP, [(entry_id, "") for entry_id in region.skipped])
            region.skipped = []


def record(config: RunConfig) -> int:
    """Run the recorder until the run is finished or a signal comes; returns the exit code."""
    setup_logging("recorder")
    stop = StopSignal().install()

    def main() -> int:
        streams = connect_regions(config)
        naming = threading.Lock()
        recorder = Recorder(streams, config.run.directory / "trajectories", config, naming=naming)
        keeper = Keeper(config.run.directory, config.recorder, naming=naming)
        copier = _copier(config)
        hub = connect_hub(config)
        keeper.start()
        if copier is not None:
            copier.start()
        sd_notify("READY=1")
        quiet = 0
        waiting_since = time.monotonic()
        while not stop.is_set() and quiet < QUIET_POLLS_TO_END:
            busy = recorder.poll()
            sd_notify("WATCHDOG=1")
            finished = not busy and _finished(hub.runs.finished)
            paused = recorder.paused()
            quiet = quiet + 1 if finished and not paused else 0
            if not (finished and paused):
                waiting_since = time.monotonic()
            waited_s = time.monotonic() - waiting_since
            if waited_s > config.channel.connect_deadline_s:
                why = "; ".join(paused.values())
                raise DeadlineError.waiting_for(f"the last entries of {', '.join(paused)}", waited_s, why)
        recorder.flush()
        keeper.close()
        if copier is not None:
            copier.close(alive=lambda: sd_notify("WATCHDOG=1"), hurry=stop.is_set)
        return 0

    return run_service(main)


def _copier(config: RunConfig) -> StoreCopier | None:
    """None without recorder.store. Raises ConfigError if that is not usable."""
    if not config.recorder.store:
        return None
    from anabranch.consumers.store_copier import StoreCopier, open_run_store  # obstore, which few recorders need

    directory, name, section = config.run.directory, config.run.name, config.recorder
    store = open_run_store(section.store, directory=directory, run=name, options=section.store_options)
    return StoreCopier(directory, store, section, run=name)


def _delivered(delivery: Delivery) -> tuple[str, str, int] | None:
    """How a delivery names itself; None: it will turn out unreadable."""
    try:
        return delivery.entry_id, delivery.fields[b"producer"].decode(), int(delivery.fields[b"seq"])
    except (KeyError, ValueError):
        return None


def _finished(finished: Callable[[], str | None]) -> bool:
    try:
        return finished() is not None
    except StreamUnavailableError:
        return False
