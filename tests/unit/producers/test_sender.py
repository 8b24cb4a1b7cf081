"""The sender: pauses that grow and end, spools left behind, and what does not hold up the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from anabranch.producers.courier import CourierState
from anabranch.producers.sender import LONGEST_PAUSE_S, Sender
from anabranch.producers.spool_slots import SpoolSlots
from anabranch.schemas.errors import AnabranchError, ConfigError
from tests.spools import Rough, fill, fresh, section, settle_all


class Lab:
    def __init__(self, folder: Path) -> None:
        self.now, self.folder = 100.0, folder
        self.stream = Rough()
        self.slots = SpoolSlots(folder, "east", section(), adopt_after_s=10, clock=lambda: self.now)
        self.slot = self.slots.claim()
        self.spool = self.slot.spool
        self.stored: list[int] = []
        self.sender = self.new_sender()

    def new_sender(self) -> Sender:
        return Sender(
            self.stream, self.slots, self.slot,
            region="east", release_after_s=2, on_stored=self.stored.extend, clock=lambda: self.now,
        )  # fmt: skip

    def run(self, seconds: float) -> list[float]:
        """Turn by turn for so long; returns when the stream was called."""
        called, end = [], self.now + seconds
        while self.now < end:
            before = len(self.stream.calls)
            wait = self.sender.turn()
            if len(self.stream.calls) > before:
                called.append(self.now)
            self.now += max(wait, 0.001)
        return called

    def left_behind(self, count: int) -> str:
        slot = SpoolSlots(self.folder, "east", section()).claim()
        fill(slot.spool, count)
        slot.close()
        return slot.spool.producer


def test_a_stream_that_is_away_is_tried_ever_more_rarely_and_little_is_asked_of_it(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    fill(lab.spool, 100)
    lab.stream.down = True
    with capture_logs() as logs:
        pauses = np.diff(lab.run(60))
    assert pauses[0] == pytest.approx(0.1)
    assert (np.diff(pauses) >= -1e-6).all()
    assert pauses.max() == pytest.approx(LONGEST_PAUSE_S)
    assert {kind for kind, _ in lab.stream.calls} == {"progress"}, "no payload goes where nobody answers"
    assert (lab.sender.error, lab.sender.waiting) == ("the region cannot be reached", 100)
    assert [line["groups_waiting"] for line in logs if line["log_level"] == "warning"] == [100], "said once"


def test_within_two_seconds_of_its_return_everything_goes_in_order(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    fill(lab.spool, 300)
    lab.stream.down = True
    lab.run(100)
    lab.stream.down = False
    with capture_logs() as logs:
        lab.run(LONGEST_PAUSE_S + 0.1)
    assert [e.seq for e in fresh(lab.stream)] == list(range(1, 301))
    assert (lab.sender.error, lab.sender.waiting) == ("", 0)
    assert [line["event"] for line in logs] == ["region stream is back"]


def test_a_full_stream_is_tried_with_one_record_and_what_is_settled_meanwhile_is_let_go(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    fill(lab.spool, 5)
    lab.run(1)
    lab.stream.plan = ["full"] * 50
    fill(lab.spool, 60)
    lab.stream.calls.clear()
    lab.run(4)
    assert [n for kind, n in lab.stream.calls if kind == "append"][:4] == [60, 1, 1, 1]
    settle_all(lab.stream)
    lab.run(8)
    assert lab.spool.floor == 6
    lab.stream.plan.clear()
    lab.run(3)
    assert lab.sender.waiting == 0


def test_the_first_pause_is_short_again_after_a_success(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.stream.down = True
    lab.run(30)
    lab.stream.down = False
    lab.run(3)
    lab.stream.down = True
    assert np.diff(lab.run(5))[1] < 0.3


def test_a_quiet_producer_asks_about_once_a_second(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.run(30)
    assert 20 <= len(lab.stream.calls) <= 31


def test_a_spool_left_behind_is_sent_and_removed_when_it_is_settled(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    producer = lab.left_behind(80)
    fill(lab.spool, 3)
    lab.run(8)
    assert lab.sender.adopted == 0, "its own process may come back"
    lab.run(5)
    assert lab.sender.adopted == 1
    lab.run(3)
    found = fresh(lab.stream)
    assert sorted((e.producer, e.seq) for e in found) == sorted(
        [(lab.spool.producer, seq) for seq in (1, 2, 3)] + [(producer, seq) for seq in range(1, 81)]
    )
    assert lab.stored == [10, 20, 30], "the others' leases are not ours"
    assert lab.sender.adoptions() == [(producer, list(range(10, 801, 10)))]
    assert lab.sender.adoptions() == []
    lab.run(20)
    assert (tmp_path / "east" / "01").exists(), "nothing is settled yet"
    settle_all(lab.stream)
    with capture_logs() as logs:
        lab.run(8)
    assert [line["event"] for line in logs] == ["adopted spool is empty and removed"]
    assert not (tmp_path / "east" / "01").exists()
    assert lab.stream.progress(producer).next_seq is None, "the stream has forgotten it too"
    assert lab.sender.adopted == 0
    assert lab.sender.courier.state is CourierState.EMPTY


def test_an_empty_spool_left_behind_goes_at_once(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.left_behind(0)
    lab.run(20)
    assert not (tmp_path / "east" / "01").exists()


def test_a_broken_spool_of_a_neighbour_holds_up_nobody(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    producer = lab.left_behind(4)
    real = lab.stream.append

    def append(envelopes, *, floor):
        if envelopes[0].producer == producer:
            raise ConfigError("no such thing")
        return real(envelopes, floor=floor)

    lab.stream.append = append  # type: ignore[method-assign]
    with capture_logs() as logs:
        lab.run(60)
        fill(lab.spool, 3)
        lab.run(3)
    assert [e.seq for e in fresh(lab.stream)] == [1, 2, 3]
    assert [line["error"] for line in logs if line["log_level"] == "error"] == ["no such thing"]
    assert (tmp_path / "east" / "01").exists()


def test_when_it_closes_adopted_spools_are_free_for_others(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    producer = lab.left_behind(4)
    lab.run(15)
    assert lab.sender.adopted == 1
    lab.sender.close()
    assert SpoolSlots(tmp_path, "east", section()).claim().spool.producer == producer


def test_what_no_try_would_mend_is_raised(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    fill(lab.spool, 1)

    def refuse(*_: object, **__: object) -> int:
        raise AnabranchError("refused a command")

    lab.stream.append = refuse  # type: ignore[method-assign]
    with pytest.raises(AnabranchError, match="refused a command"):
        lab.run(5)


def test_a_neighbour_killed_while_it_removes_a_spool_leaves_nothing_to_give_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream has forgotten the producer: records still in the files would be taken for new ones."""
    lab = Lab(tmp_path)
    producer = lab.left_behind(30)
    lab.run(15)
    settle_all(lab.stream)
    with monkeypatch.context() as patch:
        patch.setattr(lab.slots, "remove", lambda slot: (_ for _ in ()).throw(OSError("killed here")))
        lab.run(6)
        assert lab.stream.progress(producer).next_seq is None
    lab.sender.close()
    lab.sender = lab.new_sender()
    lab.stream.calls.clear()
    lab.run(30)
    assert not [call for call in lab.stream.calls if call[0] == "append"]
    assert not (tmp_path / "east" / "01").exists()
