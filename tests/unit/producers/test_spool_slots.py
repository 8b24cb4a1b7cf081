"""Slots: one living process per spool, and none left behind."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from anabranch.producers import spool_slots
from anabranch.producers.mirror_lock import FileLock
from anabranch.producers.spool_slots import Slot, SpoolSlots
from anabranch.schemas.errors import ConfigError, DeadlineError
from tests.spools import fill, section, segments


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def slots(folder: Path, clock: Clock | None = None) -> SpoolSlots:
    return SpoolSlots(folder, "east", section(), adopt_after_s=10, clock=clock or Clock())


def left_behind(folder: Path, count: int = 3) -> str:
    """A spool with `count` groups whose process has gone; its producer."""
    slot = slots(folder).claim()
    fill(slot.spool, count)
    slot.close()
    return slot.spool.producer


def test_processes_take_slots_of_their_own_and_go_on_with_what_is_there(tmp_path: Path) -> None:
    first, second = slots(tmp_path).claim(), slots(tmp_path).claim()
    assert [s.folder for s in (first, second)] == [tmp_path / "east" / "00", tmp_path / "east" / "01"]
    assert first.spool.producer.startswith("east-00-")
    assert second.spool.producer.startswith("east-01-")
    fill(first.spool, 3)
    first.close()
    third = slots(tmp_path).claim()
    assert (third.spool.producer, third.spool.next_seq) == (first.spool.producer, 4)


def test_two_runs_or_regions_never_share_an_id(tmp_path: Path) -> None:
    assert left_behind(tmp_path / "a") != left_behind(tmp_path / "b")


def test_only_the_owner_may_look_into_it(tmp_path: Path) -> None:
    slot = slots(tmp_path).claim()
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (slot.folder.parent, slot.folder, *segments(slot.folder))}
    assert all(mode & 0o077 == 0 for mode in modes.values()), modes


def test_a_spool_is_adopted_when_nobody_has_come_for_it(tmp_path: Path) -> None:
    producer = left_behind(tmp_path)
    clock = Clock()
    own = SpoolSlots(tmp_path, "east", section(), clock=clock)
    neighbour = slots(tmp_path, clock)
    mine = _claim_second(own)
    assert neighbour.adopt(ours=[mine.folder]) is None
    clock.now += 9.9
    assert neighbour.adopt(ours=[mine.folder]) is None
    clock.now += 0.1
    slot = neighbour.adopt(ours=[mine.folder])
    assert slot is not None
    assert (slot.spool.producer, slot.spool.next_seq) == (producer, 4)
    assert neighbour.adopt(ours=[mine.folder, slot.folder]) is None
    assert slots(tmp_path).claim().folder.name == "02", "an adopted spool has a holder"


def _claim_second(own: SpoolSlots) -> Slot:
    """Slot 01, though 00 is free."""
    first = own.claim()
    second = own.claim()
    first.close()
    return second


def test_a_spool_whose_process_came_back_is_left_to_it(tmp_path: Path) -> None:
    left_behind(tmp_path)
    clock = Clock()
    neighbour = slots(tmp_path, clock)
    assert neighbour.adopt(ours=[]) is None
    back = slots(tmp_path).claim()
    clock.now += 5
    assert neighbour.adopt(ours=[]) is None
    back.close()
    clock.now += 6  # free for less than ten seconds, though first seen free eleven ago
    assert neighbour.adopt(ours=[]) is None
    clock.now += 10
    assert neighbour.adopt(ours=[]) is not None


@pytest.mark.parametrize("known", [True, False])
def test_no_number_is_given_twice_when_the_machine_lost_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """The disk kept two groups of three, the Redis beside it as many; the learner had all three."""
    boot = tmp_path / "boot_id"
    boot.write_text("first")
    monkeypatch.setattr(spool_slots, "BOOT", boot)
    producer = left_behind(tmp_path, 2)
    boot.write_text("second")
    if not known:
        (tmp_path / "east" / "00" / "boot").unlink()
    clock = Clock()
    own = slots(tmp_path, clock)
    slot = own.claim()
    assert (slot.folder.name, slot.spool.next_seq) == ("01", 1)
    assert own.adopt(ours=[slot.folder]) is None
    clock.now += 10
    adopted = own.adopt(ours=[slot.folder])
    assert adopted is not None
    assert (adopted.spool.producer, adopted.spool.next_seq) == (producer, 3)
    own.remove(adopted)
    assert not adopted.folder.exists()
    slot.close()
    fresh, again = slots(tmp_path).claim(), slots(tmp_path).claim()
    assert (fresh.folder.name, fresh.spool.next_seq) == ("00", 1)
    assert again.spool.producer == slot.spool.producer, "the machine was not started anew since"


def test_where_nobody_says_when_the_machine_was_started_it_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_slots, "BOOT", tmp_path)  # a folder: opening it fails, as a hidden file does
    producer = left_behind(tmp_path)
    assert slots(tmp_path).claim().spool.producer == producer


def test_an_empty_spool_is_removed_and_its_slot_goes_to_a_new_producer(tmp_path: Path) -> None:
    slot = slots(tmp_path).claim()
    fill(slot.spool, 2)
    slot.spool.release(3)
    slots(tmp_path).remove(slot)
    assert not slot.folder.exists()
    fresh = slots(tmp_path).claim()
    assert fresh.folder == slot.folder
    assert fresh.spool.producer != slot.spool.producer
    assert fresh.spool.next_seq == 1


def test_a_spool_of_another_format_is_left_alone_and_said_once(tmp_path: Path) -> None:
    left_behind(tmp_path)
    (tmp_path / "east" / "00" / "other.spool").write_bytes(b"?")
    clock = Clock()
    neighbour = slots(tmp_path, clock)
    with capture_logs() as logs:
        own = slots(tmp_path).claim()
        assert own.folder.name == "01"
        for _ in range(5):
            clock.now += 20
            assert neighbour.adopt(ours=[own.folder]) is None
    assert len([line for line in logs if line["log_level"] == "error"]) == 2, (
        "by the one that claims and by the neighbour"
    )
    assert len(segments(tmp_path / "east" / "00")) == 2


def test_a_folder_that_cannot_be_made_is_a_fault_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"the spool in .*file/east cannot be opened: .*; spool.dir must be a folder"):
        slots(tmp_path / "file").claim()


def test_a_neighbour_that_is_stopped_while_it_looks_holds_nobody_up(tmp_path: Path) -> None:
    left_behind(tmp_path)
    stuck = FileLock(tmp_path / "east" / "lock", "the list")
    assert stuck.try_lock()
    with pytest.raises(DeadlineError, match=f"the list of spools in .*, held by process {os.getpid()}"):
        slots(tmp_path).adopt(ours=[])
    stuck.close()


def test_many_that_start_at_once_all_get_one(tmp_path: Path) -> None:
    claimed: list[Slot] = []
    threads = [threading.Thread(target=lambda: claimed.append(slots(tmp_path).claim())) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({slot.folder for slot in claimed}) == len({slot.spool.producer for slot in claimed}) == 12


HOLDER = """
import os, sys, time
from pathlib import Path
from anabranch.producers.spool_slots import SpoolSlots
from anabranch.schemas.config import SpoolSection
slot = SpoolSlots(Path(sys.argv[1]), "east", SpoolSection()).claim()
slot.spool.append(5, b"x")
child = os.fork() if sys.argv[2] == "fork" else 0
if sys.argv[2] == "exec":
    import subprocess
    child = subprocess.Popen(["sleep", "60"], close_fds=False).pid
if child or sys.argv[2] == "none":
    print(slot.spool.producer, child, flush=True)
time.sleep(60)
"""


@pytest.mark.process
@pytest.mark.parametrize("child", ["none", "fork", "exec"])
def test_the_spool_of_a_killed_process_is_free_at_once(tmp_path: Path, child: str) -> None:
    """Whatever children it leaves: an engine's worker that outlives it must not keep its groups from being sent."""
    holder = subprocess.Popen(
        [sys.executable, "-I", "-c", HOLDER, str(tmp_path), child], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    try:
        producer, child_pid = holder.stdout.readline().split()
        other = slots(tmp_path).claim()
        assert other.folder.name == "01"
        other.close()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        if child == "fork":
            time.sleep(0.05)  # the child closes its copies before anything else, but it has to get the processor
        slot = slots(tmp_path).claim()
        assert (slot.spool.producer, slot.spool.next_seq) == (producer, 2)
        if int(child_pid):
            os.kill(int(child_pid), 0)  # it is alive
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
        if child != "none":
            os.kill(int(child_pid), signal.SIGKILL)


def test_a_copy_of_a_spool_beside_it_does_not_go_on_under_its_id(tmp_path: Path) -> None:
    """Two producers under one id would each take the other's groups for its own: the stream stores a number once."""
    first = slots(tmp_path).claim()
    fill(first.spool, 2)
    shutil.copytree(first.folder, tmp_path / "east" / "01")
    second = slots(tmp_path).claim()
    assert second.spool.producer != first.spool.producer
    assert second.folder.name == "02"
