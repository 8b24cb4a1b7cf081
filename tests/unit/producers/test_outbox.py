"""A finished group is safe when `put` returns, and reaches its stream once and in order."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from anabranch.producers.spool_load import read_spool
from anabranch.schemas.errors import ConfigError, TrajectoryError
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.schemas.trajectory import decode_group, encode_group
from anabranch.transport.memory_stream import MemoryStream, MemoryStreamStore
from tests.groups import group, rollout
from tests.spools import Rough, fresh, section
from tests.unit.producers.outbox_lab import Lab, big, outbox, stored


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


def test_in_memory_and_on_disk_a_group_is_the_same_bytes(tmp_path: Path) -> None:
    stream = MemoryStream(MemoryStreamStore())
    box = outbox(stream, tmp_path)
    box.put(group(3))
    ((_, _, _, payload),) = read_spool(tmp_path / "east" / "00")
    assert payload == encode_group(replace(group(3), spooled_ms=decode_group(payload).spooled_ms))
    box.sender.turn()
    (delivery,) = stream.read(LEARNER_GROUP, "c", max_entries=9, block_ms=0)
    assert delivery.fields[b"payload"] == payload


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
