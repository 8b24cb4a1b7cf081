"""A finished group is safe when `put` returns, and reaches its stream once and in order, whatever is away or full."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from anabranch.producers.outbox import Outbox, OutboxState
from anabranch.producers.spool_load import read_spool
from anabranch.producers.spool_slots import SpoolSlots
from anabranch.schemas.config import SpoolSection
from anabranch.schemas.errors import ConfigError, DeadlineError, TrajectoryError
from anabranch.schemas.keys import LEARNER_GROUP, Keys
from anabranch.schemas.trajectory import Group, decode_group, encode_group
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.memory_stream import MemoryStream, MemoryStreamStore
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_stream import RedisStream
from anabranch.transport.stream import TrajectoryStream
from tests.contract.flaky_link import FlakyLink
from tests.groups import group, rollout
from tests.spools import Rough, fresh, section, settle_all, small_disk


def outbox(stream: TrajectoryStream, folder: Path, spool: SpoolSection | None = None, **options: object) -> Outbox:
    made = spool or section()
    options = {"max_entry_bytes": 1 << 24, "groups_in_flight": 2, **options}
    return Outbox(stream, SpoolSlots(folder, "east", made), made, region="east", **options)


def big(index: int, size: int) -> Group:
    return replace(group(index), prompt_text="x" * size)


class Lab:
    """An outbox without threads, and a clock."""

    def __init__(self, folder: Path, **spool: object) -> None:
        self.now = 50.0
        self.stream = Rough()
        self.folder = folder
        self.outbox = outbox(self.stream, folder, section(**spool), clock=lambda: self.now)

    def run(self, seconds: float = 1.0) -> None:
        end = self.now + seconds
        while self.now < end:
            self.outbox.sender.turn()
            self.outbox.keep()
            self.now += 0.1

    def spooled(self) -> list[int]:
        return [index for _, _, index, _ in read_spool(self.folder / "east" / "00")]


def stored(stream: TrajectoryStream) -> list[int]:
    envelopes = fresh(stream)
    assert all(decode_group(e.payload).group_index == e.group_index for e in envelopes)
    return [e.group_index for e in envelopes]


def test_a_group_is_on_disk_when_put_returns_and_in_the_stream_soon_after(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    for index in (7, 3, 9):
        lab.outbox.put(group(index))
    assert lab.spooled() == [7, 3, 9]
    assert (len(lab.outbox), lab.outbox.waiting(), lab.outbox.appended()) == (3, {7, 3, 9}, [])
    lab.run()
    assert (len(lab.outbox), lab.outbox.waiting(), lab.outbox.appended()) == (0, set(), [7, 3, 9])
    assert lab.outbox.appended() == []
    assert stored(lab.stream) == [7, 3, 9]
    assert lab.spooled() == [7, 3, 9], "until they are settled"


def test_what_a_killed_process_left_is_known_to_the_next_and_sent(tmp_path: Path) -> None:
    first = Lab(tmp_path)
    first.stream.down = True
    for index in (4, 5):
        first.outbox.put(group(index))
    first.outbox._slot.close()  # as the kernel does
    second = Lab(tmp_path)
    assert second.outbox.producer == first.outbox.producer
    assert second.outbox.waiting() == {4, 5}
    second.outbox.put(group(6))
    second.run()
    assert stored(second.stream) == [4, 5, 6]


def test_a_malformed_group_is_refused_at_once_and_costs_no_number(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    bad = replace(group(1), rollouts=(replace(rollout(), reward=float("nan")),))
    with pytest.raises(TrajectoryError, match="reward is nan"):
        lab.outbox.put(bad)
    lab.outbox.put(group(2))
    lab.run()
    assert [(e.seq, e.group_index) for e in fresh(lab.stream)] == [(1, 2)]


def test_a_group_that_no_entry_can_hold_is_a_fault_of_the_configuration(tmp_path: Path) -> None:
    """Exit 78: with any other code the producers would be restarted, sample it again and die of it one by one."""
    small = outbox(Rough(), tmp_path, max_entry_bytes=1024)
    with pytest.raises(
        ConfigError, match=r"group 7 of \d+ bytes does not fit an entry; lower sampling.group_size or .*1024"
    ):
        small.put(group(7))
    spool = section(max_bytes=2**16)
    with pytest.raises(ConfigError, match=r"group 8 of \d+ bytes does not fit the spool; .* spool.max_bytes \(65536\)"):
        outbox(Rough(), tmp_path, spool).put(big(8, 2**16))


def test_it_stops_accepting_while_what_is_in_flight_still_fits(tmp_path: Path) -> None:
    lab = Lab(tmp_path, max_bytes=2**20, segment_bytes=2**16)
    lab.stream.down = True
    with capture_logs() as logs:
        lab.run(1)
        count = 0
        while lab.outbox.accepts:
            lab.outbox.put(big(count, 15_000))
            count += 1
        for extra in range(2):  # in flight when it turned False
            lab.outbox.put(big(count + extra, 15_000))
    assert count > 5
    assert lab.spooled() == list(range(count + 2)), "all of them on disk"
    assert lab.outbox.waiting_for == f"room in the spool ({tmp_path}/east/00)"
    assert "the spool is full" in lab.outbox.error
    assert "the region cannot be reached" in lab.outbox.error
    assert [line["state"] for line in logs if line["log_level"] == "error"] == ["full"]
    lab.stream.down = False
    lab.run(5)
    assert not lab.outbox.accepts, "sent is not settled"
    assert sorted(e.group_index for e in settle_all(lab.stream)) == list(range(count + 2))
    lab.run(5)
    assert lab.outbox.accepts
    assert (lab.outbox.error, lab.outbox.waiting_for) == ("", "")


def test_beyond_its_bound_groups_wait_in_memory_and_nothing_is_lost(tmp_path: Path) -> None:
    lab = Lab(tmp_path, max_bytes=2**17, segment_bytes=2**15)
    lab.stream.down = True
    for index in range(30):  # more than anybody promised
        lab.outbox.put(big(index, 2_000))
    written = lab.spooled()
    assert sum(p.stat().st_size for p in (tmp_path / "east" / "00").glob("*.spool")) <= 2**17
    assert 0 < len(written) < 30
    assert (len(lab.outbox), lab.outbox.waiting()) == (30, set(range(30)))
    lab.stream.down = False
    got: list[int] = []
    for _ in range(20):
        lab.run(3)
        got += [e.group_index for e in settle_all(lab.stream)]
    assert got == list(range(30))
    assert lab.outbox.accepts


def test_it_is_held_up_while_the_stream_takes_nothing_and_a_round_of_groups_waits(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    held_up = []
    for index in range(3):  # groups_in_flight is 2
        lab.outbox.put(group(index))
        held_up.append(lab.outbox.held_up)
    assert held_up == [False] * 3, "nothing is known to be wrong"
    lab.stream.down = True
    lab.run()
    assert lab.outbox.held_up
    assert lab.outbox.accepts, "the spool has room"
    lab.stream.down = False
    lab.run(3)
    assert not lab.outbox.held_up
    lab.stream.down = True
    lab.outbox.put(group(3))
    lab.run()
    assert not lab.outbox.held_up, "one group waits"


def test_a_full_spool_is_waited_for_up_to_its_deadline(tmp_path: Path) -> None:
    lab = Lab(tmp_path, max_bytes=2**16, full_deadline_s=100)
    lab.stream.down = True
    lab.run(1000)
    lab.outbox.check()  # a region that is away is none of its business while there is room
    while lab.outbox.accepts:
        lab.outbox.put(big(0, 5_000))
    lab.run(99)
    lab.outbox.check()
    lab.run(3)
    with pytest.raises(
        DeadlineError, match=r"gave up after 10\d.* s waiting for room in the spool \(.*east/00\); the spool is"
    ):
        lab.outbox.check()


def test_on_a_full_disk_groups_wait_in_memory_and_are_tried_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path, full_deadline_s=100)
    lab.outbox.put(group(0))
    tries: list[float] = []
    real = os.pwritev

    def full(*_: object) -> int:
        tries.append(lab.now)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with capture_logs() as logs:
        lab.outbox.put(group(1))
        assert not lab.outbox.accepts
        lab.outbox.put(group(2))
        lab.run(90)
    assert all(b - a > 0.99 for a, b in itertools.pairwise(tries))
    assert 80 < len(tries) < 93
    assert [(line["state"], line["in_memory"]) for line in logs if line["log_level"] == "error"] == [
        ("disk", 1),
        ("disk", 2),
    ]
    assert (len(lab.outbox), lab.outbox.waiting()) == (2, {1, 2})
    assert lab.outbox.waiting_for == f"the disk to take the spool's writes ({tmp_path}/east/00)"
    lab.outbox.check()
    lab.run(12)
    with pytest.raises(DeadlineError, match=r"waiting for the disk to take .*No space left on device"):
        lab.outbox.check()
    monkeypatch.setattr(os, "pwritev", real)
    lab.run(2)
    assert lab.outbox.accepts
    assert lab.spooled() == [0, 1, 2]
    assert stored(lab.stream) == [0, 1, 2]
    lab.outbox.check()


def test_the_files_are_synced_at_their_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, fsync="interval", fsync_interval_ms=2000)
    synced: list[float] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(lab.now))
    for index in range(100):
        lab.outbox.put(group(index))
        lab.run(0.1)
    assert 4 <= len(synced) <= 6
    monkeypatch.setattr(os, "fdatasync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
    lab.outbox.put(group(100))
    with capture_logs() as logs:
        lab.run(7)
    assert [line["event"] for line in logs] == ["fsync of the spool failed"]
    assert "I/O error" in lab.outbox.error
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
    lab.run(3)
    assert lab.outbox.error == ""


def test_it_does_not_sync_when_told_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, fsync="never")
    monkeypatch.setattr(os, "fdatasync", lambda fd: pytest.fail("synced"))
    lab.outbox.put(group(1))
    lab.run(5)


# With its threads.


def until(condition: Callable[[], object], what: str, deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s} s for {what}"
        time.sleep(0.005)


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


def test_in_memory_and_on_disk_a_group_is_the_same_bytes(tmp_path: Path) -> None:
    stream = MemoryStream(MemoryStreamStore())
    box = outbox(stream, tmp_path)
    box.put(group(3))
    ((_, _, _, payload),) = read_spool(tmp_path / "east" / "00")
    assert payload == encode_group(group(3))
    box.sender.turn()
    (delivery,) = stream.read(LEARNER_GROUP, "c", max_entries=9, block_ms=0)
    assert delivery.fields[b"payload"] == payload


def test_a_spool_that_is_removed_under_it_is_told_and_costs_no_group(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.outbox.put(group(1))
    lab.run()
    shutil.rmtree(tmp_path / "east")
    lab.outbox.put(group(2))
    lab.run()
    assert not lab.outbox.accepts
    assert "was removed under this producer" in lab.outbox.error
    assert lab.outbox.waiting() == {2}, "in memory"
    assert stored(lab.stream) == [1], "no tombstone"
