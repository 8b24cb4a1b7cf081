"""An outbox with its threads: starts, stops, real disks and real servers."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from anabranch.producers.outbox import OutboxState
from anabranch.producers.spool_slots import SpoolSlots
from anabranch.schemas.errors import ConfigError
from anabranch.schemas.keys import Keys
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_stream import RedisStream
from tests.contract.flaky_link import FlakyLink
from tests.groups import group
from tests.spools import Rough, section, settle_all, small_disk
from tests.unit.producers.outbox_lab import big, outbox, stored, until


def test_stopped_while_the_region_is_away_it_ends_at_once_and_says_what_waits_where(tmp_path: Path) -> None:
    stream = Rough()
    stream.down = True
    box = outbox(stream, tmp_path)
    box.start()
    box.put(group(0))
    box.put(group(1))
    until(lambda: box.error, "the failure to be noticed")
    with capture_logs() as logs:
        box.close()
    assert [(line["groups"], line["spool"], line["region"]) for line in logs if line["log_level"] == "warning"] == [
        (2, f"{tmp_path}/east/00", "east")
    ]
    stream.down = False
    successor = outbox(stream, tmp_path)
    assert successor.producer == box.producer
    successor.start()
    until(lambda: not len(successor), "what was left to be sent")
    assert stored(stream) == [0, 1]
    successor.close()
    successor.close()


def test_stopped_while_the_region_answers_it_leaves_nothing_behind(tmp_path: Path) -> None:
    stream = Rough()
    box = outbox(stream, tmp_path)
    box.start()
    for index in range(200):
        box.put(group(index))
    box.close()
    assert len(box) == 0
    assert stored(stream) == list(range(200))


def test_a_call_that_hangs_does_not_hold_up_a_stop(tmp_path: Path) -> None:
    hung = threading.Event()

    class Hanging(Rough):
        let_go = threading.Event()

        def progress(self, producer):
            hung.set()
            self.let_go.wait(100)
            raise AssertionError

    stream = Hanging()
    box = outbox(stream, tmp_path)
    box.start()
    until(hung.is_set, "the call")
    box.put(group(1))
    box.close()
    assert not stream.let_go.is_set()
    assert SpoolSlots(tmp_path, "east", section()).claim().folder.name == "01", "its thread may still be at work"
    stream.let_go.set()


def test_what_the_sender_dies_of_is_raised_to_the_loop(tmp_path: Path) -> None:
    class Refusing(Rough):
        def progress(self, producer):
            raise ConfigError("refused the credentials")

    box = outbox(Refusing(), tmp_path)
    box.start()
    until(lambda: box._threads[0].failure, "the sender to fail")
    with pytest.raises(ConfigError, match="refused the credentials"):
        box.check()
    box.put(group(1))
    box.close()
    assert box.state is OutboxState.CLOSED
    assert outbox(Rough(), tmp_path).waiting() == {1}


def test_one_that_never_started_gives_its_spool_back(tmp_path: Path) -> None:
    box = outbox(Rough(), tmp_path)
    box.close()
    assert outbox(Rough(), tmp_path).producer == box.producer


def test_put_waits_for_no_network(tmp_path: Path) -> None:
    answer = threading.Event()

    class Slow(Rough):
        def append(self, envelopes, *, floor):
            answer.wait(100)
            return super().append(envelopes, floor=floor)

    box = outbox(Slow(), tmp_path)
    box.start()
    for index in range(300):
        box.put(group(index))
    assert (len(box), len(box.waiting())) == (300, 300)
    answer.set()
    until(lambda: not len(box), "all to be sent")
    box.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_is_really_full_and_then_is_not(tmp_path: Path) -> None:
    try:
        with small_disk(tmp_path / "disk", 1 << 20) as disk:
            stream = Rough()
            box = outbox(stream, disk, section(fsync_interval_ms=50))
            ballast = disk / "ballast"
            ballast.write_bytes(b"x" * (900 * 1024))
            box.start()
            count = 0
            with capture_logs() as logs:
                while box.accepts:
                    box.put(big(count, 20_000))
                    count += 1
                box.put(big(count, 20_000))
                until(lambda: len(box) == 2, "what is on disk to be sent")
                ballast.unlink()
                until(lambda: box.accepts and not len(box), "everything to be sent")
            assert stored(stream) == list(range(count + 1))
            states = [line["event"] for line in logs if "spool takes" in line["event"] or "disk" in line["event"]]
            assert len(states) == 2
            assert "No space left on device" in states[0]
            box.close()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"mounting is not allowed here: {error.stderr!r}")


# Real servers.


@pytest.fixture
def flaky(valkey: EmbeddedValkey, keys: Keys) -> Iterator[tuple[FlakyLink, RedisStream]]:
    link = FlakyLink(valkey.port)
    url = valkey.url.replace(str(valkey.port), str(link.port))
    stream = RedisStream(connect(url, deadline_s=10, what="the region"), keys)
    yield link, stream
    stream.close()
    link.close()


@pytest.mark.process
def test_real_answers_lost_on_the_way(flaky, tmp_path: Path) -> None:
    link, stream = flaky
    box = outbox(stream, tmp_path)
    box.start()
    box.put(group(0))
    until(lambda: not len(box), "the first")
    link.lose_replies(b"east-00", times=3)
    for index in range(1, 40):
        box.put(group(index))
    until(lambda: link.lost == 3 and not len(box), "all of them")
    box.close()
    assert stored(stream) == list(range(40))


@pytest.mark.process
def test_a_server_at_its_memory_limit(tmp_path: Path, keys: Keys) -> None:
    with EmbeddedValkey(tmp_path / "region", maxmemory_bytes=6 * 2**20, fsync="everysec") as server:
        stream = RedisStream(connect(server.url, deadline_s=10, what="the region"), keys)
        reader = RedisStream(connect(server.url, deadline_s=10, what="the region"), keys)
        box = outbox(stream, tmp_path / "spool")
        box.start()
        for index in range(40):
            box.put(big(index, 200_000))
        until(lambda: "takes no more data" in box.error, "the server to be full")
        assert server.password not in box.error
        assert box.accepts, "the spool has room"
        got = stored(reader)
        assert 0 < len(got) < 40
        end = time.monotonic() + 60
        while len(got) < 40:  # the learner catches up
            assert time.monotonic() < end, box.error
            got += [e.group_index for e in settle_all(reader)]
            reader.trim()
            time.sleep(0.02)
        assert got == list(range(40))
        until(lambda: not box.error, "the error to go")
        box.close()
        for each in (stream, reader):
            each.close()
