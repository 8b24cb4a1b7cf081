"""A region that takes nothing while there is room in the spool: said, and waited for up to a deadline."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.schemas.errors import DeadlineError
from tests.groups import group
from tests.unit.producers.outbox_lab import Lab, stored


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


AWAY = r"gave up after 10\d\.\d s waiting for region east to take 2 group\(s\) \(spool .*east/00\); the region cannot"


def test_a_region_that_takes_nothing_is_waited_for_up_to_the_deadline(tmp_path: Path) -> None:
    """Though the spool has room: nothing waits without end."""
    lab = Lab(tmp_path, full_deadline_s=100)
    lab.stream.down = True
    for index in range(2):
        lab.outbox.put(group(index))
    lab.watch(99)
    assert lab.outbox.accepts
    assert lab.outbox.waiting_for == "region east: 2 groups to append"
    lab.watch(0.5)
    with pytest.raises(DeadlineError, match=AWAY):
        lab.watch(5)
    lab.outbox.close()
    successor = Lab(tmp_path)
    successor.run()
    assert stored(successor.stream) == [0, 1], "nothing is lost"


def test_a_region_out_of_memory_is_waited_for_likewise(tmp_path: Path) -> None:
    """It answers what is asked, and takes nothing."""
    lab = Lab(tmp_path, full_deadline_s=100)
    lab.stream.plan = ["full"] * 1000
    lab.outbox.put(group(0))
    lab.watch(99)
    assert lab.outbox.accepts
    with pytest.raises(DeadlineError, match=r"waiting for region east to take 1 group\(s\) \(.*the region is full"):
        lab.watch(5)


def test_while_groups_are_finished_or_taken_nothing_stands_still(tmp_path: Path) -> None:
    """Where there is one region alone its producer samples on into the spool, for as long as there is room."""
    lab = Lab(tmp_path, full_deadline_s=100)
    lab.stream.down = True
    for index in range(5):
        lab.outbox.put(group(index))
        lab.watch(90)
    lab.stream.down = False
    lab.stream.plan = ["ok", "full", "ok"] + ["full"] * 1000  # it takes something, and is full
    lab.watch(90)
    assert 0 < len(lab.outbox) < 5
    with pytest.raises(DeadlineError):
        lab.watch(20)


def test_a_region_that_came_back_in_time_is_waited_for_anew(tmp_path: Path) -> None:
    lab = Lab(tmp_path, full_deadline_s=100)
    for index in range(3):
        lab.stream.down = True
        lab.outbox.put(group(index))
        lab.watch(90)
        lab.stream.down = False
        lab.watch(5)
    assert stored(lab.stream) == [0, 1, 2]


def test_a_region_that_is_away_while_nothing_is_to_be_given_to_it_is_not_waited_for(tmp_path: Path) -> None:
    lab = Lab(tmp_path, full_deadline_s=100)
    lab.stream.down = True
    lab.watch(1000)
    assert lab.outbox.waiting_for == ""
    assert lab.outbox.error == "the region cannot be reached", "it is told all the same"
