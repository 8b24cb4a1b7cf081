"""A spool without room, or a disk without: nothing further is accepted, nothing is lost, and the wait has its deadline."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from anabranch.schemas.errors import DeadlineError
from tests.groups import group
from tests.spools import settle_all
from tests.unit.producers.outbox_lab import Lab, big, stored


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
    first, *others = lab.spooled_ms()
    assert first == 50_000
    assert min(others) > 50_000 + 100_000, "when the disk took them, not when they were put"
    assert stored(lab.stream) == [0, 1, 2]
    lab.outbox.check()


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
