"""Whatever happens to recorder, disk or region: on disk every entry stands once, in the end."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.consumers.recorder import CONSUMER, Recorder
from anabranch.schemas.config import RecorderSection, RunConfig, StreamSection
from anabranch.schemas.errors import BackpressureError, StreamUnavailableError, TemporaryError
from anabranch.schemas.keys import LEARNER_GROUP, RECORDER_GROUP, Keys
from anabranch.transport.boards import RunBoard
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.memory_stream import MemoryStream
from anabranch.transport.memory_world import MemoryWorld
from anabranch.transport.redis_boards import RedisRunBoard
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_stream import RedisStream
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

    def __init__(self, directory: Path, *regions: str, rows_per_file: int = 6) -> None:
        self.directory, self.clock = directory, Clock()
        self.world = MemoryWorld("run", regions, clock_ms=lambda: self.clock.now_s * 1000)
        section = RecorderSection(rows_per_file=rows_per_file, seconds_per_file=20)
        self.config = RunConfig(recorder=section, stream=StreamSection(block_ms=1))
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
    for path in (directory / f"region={region}").glob("*.parquet"):
        table = pq.read_table(path, partitioning=None)
        rows.update(zip(table["entry_id"].to_pylist(), table["group_index"].to_pylist(), strict=True))
    assert set(rows.values()) <= {2}, f"each group has two rollouts: {rows}"
    return sorted(index for _, index in rows)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path, "east", "west")


def files(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.rglob("*") if p.is_file())


def test_a_file_is_written_when_enough_rows_are_there_and_only_then_acknowledged(lab: Lab) -> None:
    recorder = lab.recorder()
    lab.append("east", 2)
    assert recorder.poll() == 2
    assert (lab.on_disk("east"), lab.pending("east"), recorder.buffered) == ([], 2, 2)
    lab.append("east")
    recorder.poll()
    assert (lab.on_disk("east"), lab.pending("east"), recorder.buffered) == ([0, 1, 2], 0, 0)
    assert (recorder.rows_written, recorder.files_written) == (6, 1)


def test_a_file_is_written_when_its_time_has_come(lab: Lab) -> None:
    recorder = lab.recorder()
    lab.append("east")
    recorder.poll()
    lab.clock.now_s += 19
    recorder.poll()
    assert lab.on_disk("east") == []
    lab.clock.now_s += 2
    recorder.poll()
    assert (lab.on_disk("east"), lab.pending("east")) == ([0], 0)


def test_flush_writes_what_is_buffered(lab: Lab) -> None:
    recorder = lab.recorder()
    lab.append("east")
    lab.append("west", 2)
    recorder.poll()
    recorder.flush()
    assert (lab.on_disk("east"), lab.on_disk("west")) == ([0], [0, 1])
    recorder.flush()
    assert recorder.files_written == 2, "nothing to write, no file"


def test_the_learner_is_not_touched(lab: Lab) -> None:
    recorder = lab.recorder()
    lab.append("east", 3)
    recorder.poll()
    counts = lab.world.stream("east").ledger(LEARNER_GROUP)
    assert (counts.produced, counts.pending, counts.fates) == (3, 3, {})


def test_a_recorder_that_died_before_it_wrote_loses_nothing(lab: Lab) -> None:
    lab.append("east", 2)
    lab.recorder().poll()
    lab.append("east", 2)
    again = lab.recorder()
    again.poll()
    again.poll()
    again.flush()
    assert (lab.on_disk("east"), lab.pending("east")) == ([0, 1, 2, 3], 0)


class DiesBeforeAcknowledging(MemoryStream):
    def settle(self, group: str, fates: Settles) -> int:
        raise KeyboardInterrupt("killed")


def test_a_recorder_that_died_between_writing_and_acknowledging_writes_nothing_twice(lab: Lab) -> None:
    lab.append("east", 3)
    doomed = lab.recorder({"east": DiesBeforeAcknowledging(lab.world.stores["east"])})
    with pytest.raises(KeyboardInterrupt):
        doomed.poll()
    assert (lab.on_disk("east"), lab.pending("east")) == ([0, 1, 2], 3)
    lab.append("east", 2)
    again = lab.recorder()
    assert again.poll() == 3, "work was done, though nothing is to be written: the run must not look quiet"
    again.poll()
    again.flush()
    assert (lab.on_disk("east"), lab.pending("east")) == ([0, 1, 2, 3, 4], 0)


def test_many_pending_entries_on_disk_are_passed_over_page_by_page(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "east", rows_per_file=1000)
    lab.append("east", 300)
    doomed = lab.recorder({"east": DiesBeforeAcknowledging(lab.world.stores["east"])})
    for _ in range(5):
        doomed.poll()
    with pytest.raises(KeyboardInterrupt):
        doomed.flush()
    lab.append("east", 3)
    again = lab.recorder()
    quiet = 0
    while quiet < 3:  # how `record` decides that everything is read
        quiet = 0 if again.poll() else quiet + 1
    again.flush()
    assert lab.on_disk("east") == list(range(303))
    assert lab.pending("east") == 0


def test_a_half_written_file_is_removed_at_start(lab: Lab) -> None:
    torn = lab.directory / "region=east" / "1-1_1-3.tmp"
    torn.parent.mkdir()
    torn.write_bytes(b"PAR1 half")
    lab.append("east", 3)
    lab.recorder().poll()
    assert files(lab.directory) == ["1-1_1-3.parquet"]


def test_an_unreadable_entry_is_passed_over_and_left_to_the_learner(lab: Lab) -> None:
    lab.append("east")
    lab.world.stores["east"].add({b"nonsense": b"1"})
    lab.append("east", 2)
    recorder = lab.recorder()
    recorder.poll()
    assert (lab.on_disk("east"), lab.pending("east")) == ([0, 1, 2], 0)
    assert lab.world.stores["east"].dead_letters == []


def test_a_group_that_comes_again_under_another_entry_id_is_not_recorded_twice(lab: Lab) -> None:
    """A server that forgot its last second got it again from the spool; or somebody added a copy."""
    east = lab.world.stores["east"]
    recorder = lab.recorder({"east": lab.world.stream("east")})
    before = east.save()
    lab.append("east", 3)
    recorder.poll()
    assert lab.on_disk("east") == [0, 1, 2]
    east.restore(before)
    put(lab.world.stream("east"), *(entry(index) for index in range(3)))
    lab.append("east")
    recorder.poll()
    recorder.flush()
    assert (lab.on_disk("east"), lab.pending("east")) == ([0, 1, 2, 3], 0)
    for fields in list(east.entries.values()):
        east.add(fields)
    again = lab.recorder({"east": lab.world.stream("east")})
    while again.poll():
        pass
    again.flush()
    assert (lab.on_disk("east"), lab.pending("east")) == ([0, 1, 2, 3], 0), "a restarted one knows from its files"


def test_a_copy_of_what_is_not_yet_written_is_not_recorded_twice(lab: Lab) -> None:
    recorder = lab.recorder({"east": lab.world.stream("east")})
    lab.append("east")
    east = lab.world.stores["east"]
    east.add(next(iter(east.entries.values())))
    recorder.poll()
    recorder.flush()
    assert (lab.on_disk("east"), lab.pending("east")) == ([0], 0)


class Cut(MemoryStream):
    """A region that can be switched off, call by call."""

    away: tuple[str, ...] = ()
    error: type[TemporaryError] = StreamUnavailableError

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


def test_a_region_that_is_away_pauses_alone_and_is_read_when_it_is_back(lab: Lab) -> None:
    east = Cut(lab.world.stores["east"])
    east.away = ("read",)
    recorder = lab.recorder({"east": east, "west": lab.world.stream("west")})
    lab.append("east", 3)
    lab.append("west", 3)
    recorder.poll()
    recorder.poll()
    assert (lab.on_disk("east"), lab.on_disk("west")) == ([], [0, 1, 2])
    assert list(recorder.paused()) == ["east"], "a paused region is not a quiet one"
    east.away = ()
    lab.clock.now_s += 3
    recorder.poll()
    recorder.poll()
    assert (lab.on_disk("east"), recorder.paused()) == ([0, 1, 2], {})


def test_entries_whose_acknowledgement_failed_are_acknowledged_later_and_not_written_again(lab: Lab) -> None:
    east = Cut(lab.world.stores["east"])
    recorder = lab.recorder({"east": east})
    recorder.poll()
    east.away = ("settle",)
    lab.append("east", 3)
    recorder.poll()
    assert (lab.on_disk("east"), lab.pending("east")) == ([0, 1, 2], 3)
    with pytest.raises(TemporaryError, match="region east: the region cannot be reached"):
        recorder.flush()
    east.away = ()
    recorder.flush()
    assert (lab.on_disk("east"), lab.pending("east")) == ([0, 1, 2], 0)


def test_a_region_that_takes_no_writes_pauses_alone(lab: Lab) -> None:
    east = Cut(lab.world.stores["east"])
    east.away, east.error = ("read",), BackpressureError
    recorder = lab.recorder({"east": east, "west": lab.world.stream("west")})
    lab.append("west", 3)
    recorder.poll()
    recorder.poll()
    assert (lab.on_disk("west"), list(recorder.paused())) == ([0, 1, 2], ["east"])


def test_flush_writes_every_region_it_can(lab: Lab) -> None:
    east = Cut(lab.world.stores["east"])
    recorder = lab.recorder({"east": east, "west": lab.world.stream("west")})
    lab.append("east")
    lab.append("west")
    recorder.poll()
    recorder.poll()
    east.away = ("settle",)
    with pytest.raises(TemporaryError, match="not everything is recorded: region east"):
        recorder.flush()
    assert (lab.on_disk("west"), lab.pending("west")) == ([0], 0)


def test_a_full_disk_pauses_recording_and_nothing_is_lost(small_disk) -> None:
    folder, full = small_disk
    lab = Lab(folder, "east")
    recorder = lab.recorder()
    lab.append("east", 5)
    with full():
        recorder.poll()
        assert list(recorder.paused()) == ["east"]
        for _ in range(4):
            lab.append("east", 3)
            lab.clock.now_s += 3
            recorder.poll()
        assert not [name for name in files(folder) if name.endswith((".tmp", ".parquet"))]
        assert recorder.buffered == 5, "it reads no more than it can write"
        with pytest.raises(TemporaryError, match="not everything is recorded"):
            recorder.flush()
    lab.clock.now_s += 3
    for _ in range(6):
        recorder.poll()
    recorder.flush()
    assert (lab.on_disk("east"), lab.pending("east")) == (list(range(17)), 0)


ACTIONS = st.lists(st.sampled_from(["append", "poll", "time", "die", "die unacknowledged", "cut", "mend"]), max_size=25)


@settings(max_examples=40)
@given(actions=ACTIONS)
def test_neither_duplicates_nor_holes_whatever_happens(tmp_path_factory, actions: list[str]) -> None:
    lab = Lab(tmp_path_factory.mktemp("lab"), "east", rows_per_file=6)

    def start(kind: type[MemoryStream]) -> tuple[Recorder, MemoryStream]:
        stream = kind(lab.world.stores["east"])
        return lab.recorder({"east": stream}), stream

    recorder, stream = start(Cut)
    for action in actions:
        if action == "append":
            lab.append("east", 2)
        elif action == "poll":
            recorder.poll()
        elif action == "time":
            lab.clock.now_s += 21
        elif action == "die":
            recorder, stream = start(Cut)
        elif action == "die unacknowledged":
            doomed, _ = start(DiesBeforeAcknowledging)
            try:
                for _ in range(3):
                    doomed.poll()
                doomed.flush()
            except KeyboardInterrupt:
                pass
            recorder, stream = start(Cut)
        else:
            stream.away = ("settle",) if action == "cut" else ()
    recorder, _ = start(Cut)
    while recorder.poll():
        pass
    recorder.flush()
    assert lab.on_disk("east") == list(range(lab.next["east"]))
    assert lab.pending("east") == 0


# The command, over real servers.


@pytest.fixture
def board(client, keys: Keys) -> RunBoard:
    return RedisRunBoard(client, keys)


@pytest.fixture
def streams(valkey: EmbeddedValkey, keys: Keys) -> Iterator[RedisStream]:
    stream = RedisStream(connect(valkey.url, deadline_s=10, what="the test Valkey"), keys)
    yield stream
    stream.close()


def command(directory: Path, run_name: str, **settings: str) -> list[str]:
    return [
        sys.executable, "-I", "-m", "anabranch.cli.main", "record", f"--set=run.name={run_name}",
        f"--set=run.dir={directory}", *(f"--set={key.replace('__', '.')}={value}" for key, value in settings.items()),
    ]  # fmt: skip


@pytest.mark.process
def test_the_command_ends_when_the_run_is_finished_and_everything_is_written(
    tmp_path: Path, valkey: EmbeddedValkey, streams: RedisStream, board: RunBoard, run_name: str
) -> None:
    for index in range(200):
        put(streams, entry(index))
    board.start()
    board.finish("all steps done")
    argv = command(tmp_path, run_name, hub__url=valkey.url, regions__east__url=valkey.url, stream__block_ms="20")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert on_disk(tmp_path / run_name / "trajectories", "east") == list(range(200))
    assert streams.ledger(RECORDER_GROUP).pending == 0
    assert valkey.password not in done.stderr


@pytest.mark.process
def test_the_command_gives_up_with_75_when_a_region_dies_before_all_is_written(
    tmp_path: Path, valkey: EmbeddedValkey, board: RunBoard, keys: Keys, run_name: str
) -> None:
    board.start()
    with EmbeddedValkey(tmp_path / "region", fsync="everysec") as region:
        argv = command(
            tmp_path, run_name, hub__url=valkey.url, regions__east__url=region.url, stream__block_ms="20",
            channel__connect_deadline_s="1.5",
        )  # fmt: skip
        link = connect(region.url, deadline_s=10, what="the test Valkey")
        put(RedisStream(link, keys), entry(0))
        process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        end = time.monotonic() + 30
        while not handed_out(link, keys):
            assert time.monotonic() < end, "the recorder never read"
            time.sleep(0.05)
        link.close()
        region.kill()
        board.finish("all steps done")
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert "waiting for the last entries of east" in errors
    assert region.password not in errors


def handed_out(link: redis.Redis, keys: Keys) -> bool:
    """Whether the recorder holds an entry."""
    with contextlib.suppress(redis.ResponseError):  # its group is not there yet
        return bool(link.xpending_range(keys.trajectories, RECORDER_GROUP, "-", "+", 1, consumername=CONSUMER))
    return False
