"""Recorders for tests: over regions in memory that can be cut off, and what stands on disk."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from anabranch.consumers.recorded_files import recorded_files
from anabranch.consumers.recorder import Recorder
from anabranch.schemas.config import RecorderSection, RunConfig, RunSection, StreamSection
from anabranch.schemas.errors import AnabranchError, StreamUnavailableError
from anabranch.schemas.keys import RECORDER_GROUP
from anabranch.transport.memory_stream import MemoryStream
from anabranch.transport.memory_world import MemoryWorld
from anabranch.transport.stream import Delivery, TrajectoryStream
from tests.groups import entry
from tests.streams import put

Settles = list[tuple[str, str]]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Lab:
    """Regions in memory; `recorder()` is a fresh start of the process."""

    def __init__(self, directory: Path, *regions: str, rows_per_file: int = 6, bytes_per_file: int = 2**20) -> None:
        self.directory, self.clock = directory, Clock()
        self.world = MemoryWorld("run", regions, clock_ms=lambda: self.clock.now_s * 1000)
        section = RecorderSection(rows_per_file=rows_per_file, bytes_per_file=bytes_per_file, seconds_per_file=20)
        self.config = RunConfig(run=RunSection(name="run"), recorder=section, stream=StreamSection(block_ms=1))
        self.next = dict.fromkeys(regions, 0)

    def recorder(self, streams: dict[str, TrajectoryStream] | None = None) -> Recorder:
        return Recorder(streams or dict(self.world.streams()), self.directory, self.config, clock=self.clock)

    def append(self, region: str, count: int = 1) -> None:
        for _ in range(count):
            put(self.world.stream(region), entry(self.next[region]))
            self.next[region] += 1

    def pending(self, region: str) -> int:
        return self.world.stream(region).ledger(RECORDER_GROUP).pending

    def on_disk(self, region: str) -> list[int]:
        return on_disk(self.directory, region)


def on_disk(directory: Path, region: str) -> list[int]:
    """Group indices in the files of a region, once per entry; fails if an entry stands there in part or twice."""
    rows: Counter[tuple[str, int]] = Counter()
    for file in recorded_files(directory):
        if file.partition.region != region:
            continue
        table = pq.read_table(file.path, partitioning=None)
        rows.update(zip(table["entry_id"].to_pylist(), table["group_index"].to_pylist(), strict=True))
    assert set(rows.values()) <= {2}, f"each group has two rollouts: {rows}"
    return sorted(index for _, index in rows)


def files(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.rglob("*") if p.is_file())


class DiesBeforeAcknowledging(MemoryStream):
    def settle(self, group: str, fates: Settles) -> int:
        raise KeyboardInterrupt("killed")


class Cut(MemoryStream):
    """A region that can be switched off, call by call."""

    away: tuple[str, ...] = ()
    error: type[AnabranchError] = StreamUnavailableError

    def read(self, group: str, consumer: str, *, max_entries: int, block_ms: int) -> list[Delivery]:
        self._check("read")
        return super().read(group, consumer, max_entries=max_entries, block_ms=block_ms)

    def read_own_pending(self, group: str, consumer: str, *, max_entries: int, after_id: str = "0-0") -> list[Delivery]:
        self._check("read")
        return super().read_own_pending(group, consumer, max_entries=max_entries, after_id=after_id)

    def settle(self, group: str, fates: Settles) -> int:
        self._check("settle")
        return super().settle(group, fates)

    def _check(self, call: str) -> None:
        if call in self.away:
            raise self.error("the region cannot be reached")
