"""A reader over real servers that hang, die, are full, or come back without their last second."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from anabranch.consumers.arrivals import Polled
from anabranch.consumers.reader import Reader
from anabranch.schemas.config import StreamSection
from anabranch.schemas.envelope import Envelope
from anabranch.schemas.errors import BackpressureError
from anabranch.schemas.keys import LEARNER_GROUP, RECORDER_GROUP, Keys
from anabranch.schemas.trajectory import encode_group
from anabranch.transport import redis_stream
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_stream import RedisStream
from anabranch.transport.stream import TrajectoryStream
from tests.groups import entry, group
from tests.readers import drain, indices, until, wait
from tests.streams import put

pytestmark = pytest.mark.process
CONFIG = StreamSection(block_ms=20, socket_timeout_ms=1000)


def open_stream(server: EmbeddedValkey, keys: Keys) -> RedisStream:
    return RedisStream(connect(server.url, stream=CONFIG, deadline_s=10, what="the test Valkey"), keys)


@pytest.fixture
def away(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    """A server of one's own, to be stopped and killed."""
    with EmbeddedValkey(tmp_path / "away", fsync="always") as server:
        yield server
        if server.pid:
            os.kill(server.pid, signal.SIGCONT)


@pytest.fixture
def both(valkey: EmbeddedValkey, away: EmbeddedValkey, keys: Keys) -> Iterator[dict[str, TrajectoryStream]]:
    streams = {"away": open_stream(away, keys), "near": open_stream(valkey, keys)}
    yield streams
    for stream in streams.values():
        stream.close()


def own_reader(streams: dict[str, TrajectoryStream], run_name: str, config: StreamSection = CONFIG) -> Reader:
    return Reader(streams, run=run_name, group=LEARNER_GROUP, consumer="learner-0", config=config)


def test_a_region_that_hangs_does_not_delay_the_others_and_catches_up(both, away, run_name) -> None:
    """A stopped server accepts connections and answers nothing, as a network that swallows packets."""
    with own_reader(both, run_name) as reader:
        put(both["away"], entry(0, run=run_name))
        until(reader, lambda p: indices(p) == [0])
        os.kill(away.pid, signal.SIGSTOP)
        for index in range(1, 40):
            put(both["near"], entry(index, run=run_name))
            assert indices(until(reader, lambda p: p.arrivals)) == [index]
        wait(reader.unreachable, "the hanging region to be noticed")
        assert list(reader.unreachable()) == ["away"]
        assert "stream.socket_timeout_ms = 1000" in reader.unreachable()["away"]
        assert "unreachable for" in str(reader.health()["away"])
        os.kill(away.pid, signal.SIGCONT)
        put(both["away"], entry(99, run=run_name))
        arrived = indices(until(reader, lambda p: p.arrivals))
        assert arrived == [99], "group 0 we still hold: it does not come again"
        assert reader.unreachable() == {}


def test_a_region_that_was_killed_comes_back_with_everything(both, away, run_name) -> None:
    with own_reader(both, run_name) as reader:
        for index in range(3):
            put(both["away"], entry(index, run=run_name))
        assert indices(until(reader, lambda p: len(p.arrivals) == 3)) == [0, 1, 2]
        away.kill()
        put(both["near"], entry(10, run=run_name))
        assert indices(until(reader, lambda p: p.arrivals)) == [10]
        wait(reader.unreachable, "the loss to be noticed")
        assert away.password not in str(reader.unreachable())
        away.start()
        put(both["away"], entry(3, run=run_name))
        assert indices(until(reader, lambda p: p.arrivals)) == [3]
    with own_reader(both, run_name) as again:
        total = until(again, lambda p: len(p.arrivals) == 5)
        assert indices(total) == [0, 1, 2, 3, 10], "a new process reads all that is not settled"


def test_outages_alone_never_make_a_dead_letter(away, keys, run_name) -> None:
    """An entry waits for its checkpoint through any number of outages: only deliveries that ended in a crash count."""
    stream = open_stream(away, keys)
    with own_reader({"away": stream}, run_name, CONFIG.model_copy(update={"max_deliveries": 2})) as reader:
        put(stream, entry(0, run=run_name))
        until(reader, lambda p: indices(p) == [0])
        for outage in range(3):
            away.kill()
            wait(reader.unreachable, "the loss to be noticed")
            away.start()
            put(stream, entry(outage + 1, run=run_name))
            total = until(reader, lambda p: p.arrivals)
            assert (indices(total), total.dead) == ([outage + 1], [])
            assert drain(reader) == Polled()
    stream.close()


class Backup:
    """The data of a server as they are now; `restore` brings the server back without anything since."""

    def __init__(self, server: EmbeddedValkey, folder: Path, copy: Path) -> None:
        self.server, self.folder, self.copy = server, folder, copy
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.sock", "*.log"))

    def restore(self) -> None:
        self.server.kill()
        for place in self.copy.iterdir():
            if place.is_dir():
                shutil.rmtree(self.folder / place.name, ignore_errors=True)
                shutil.copytree(place, self.folder / place.name)
        self.server.start()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_stream, "VERIFY_EVERY_S", 0.1)


def test_what_a_server_forgot_that_we_acknowledged_comes_again(away, keys, run_name, tmp_path, often) -> None:
    stream = open_stream(away, keys)
    stream.read(RECORDER_GROUP, "r", max_entries=1, block_ms=0)  # so that nothing is trimmed
    with own_reader({"away": stream}, run_name) as reader:
        put(stream, entry(0, run=run_name), entry(1, run=run_name))
        first = until(reader, lambda p: len(p.arrivals) == 2).arrivals
        backup = Backup(away, tmp_path / "away", tmp_path / "copy")
        reader.settle("away", [(first[0].entry_id, "trained")])
        assert reader.flush(deadline_s=20)
        assert stream.ledger(LEARNER_GROUP).pending == 1
        backup.restore()  # so fast that the reader may not notice
        assert indices(until(reader, lambda p: p.arrivals)) == [0], "and not group 1, which we hold"
        reader.settle("away", [(first[0].entry_id, "trained")])
        assert reader.flush(deadline_s=20)
        assert stream.ledger(LEARNER_GROUP).fates == {"trained": 1}
    stream.close()


def test_a_full_region_can_still_be_read_and_emptied(tmp_path, keys, run_name) -> None:
    with EmbeddedValkey(tmp_path / "full", maxmemory_bytes=6 * 2**20, fsync="everysec") as server:
        stream = open_stream(server, keys)
        big = replace(group(0, run=run_name), prompt_text="x" * 200_000)
        stream.read(LEARNER_GROUP, "learner-0", max_entries=1, block_ms=0)
        stored = 0
        with contextlib.suppress(BackpressureError):
            for index in range(100):
                payload = encode_group(replace(big, group_index=index))
                stored = stream.append([Envelope("p", index, index, payload)], floor=0)
        assert 0 < stored < 100
        with own_reader({"full": stream}, run_name) as reader:
            total = until(reader, lambda p: len(p.arrivals) == stored)
            reader.settle("full", [(a.entry_id, "trained") for a in total.arrivals])
            assert reader.flush(deadline_s=20)
            wait(lambda: stream.state().entries == 0, "what is settled to be trimmed")
        assert put(stream, entry(stored, run=run_name)) == 1
        stream.close()
