"""One spool and one stream: each group stored once and in order, again where the stream forgot, kept until settled."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from anabranch.producers.courier import ASK_EVERY_S, CourierState
from anabranch.producers.spool import Spool
from anabranch.producers.spool_file import RECORD_HEADER, SEGMENT_HEADER
from anabranch.schemas.errors import BackpressureError, ConfigError, StreamUnavailableError
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.transport.stream import ProducerProgress
from tests.spools import fill, fresh, section, segments, settle_all
from tests.unit.producers.courier_lab import Lab


def test_it_asks_before_it_gives_and_gives_in_order_in_batches(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    fill(lab.spool, 150)
    assert lab.courier.state is CourierState.ASKING
    assert not lab.courier.send()
    lab.drain()
    assert lab.stream.calls == [("progress", 0), ("append", 64), ("append", 64), ("append", 22)]
    assert lab.numbers() == list(range(1, 151))
    assert lab.stored == [10 * seq for seq in range(1, 151)]
    assert lab.courier.state is CourierState.SETTLING


def test_what_the_stream_holds_already_is_not_given_again(tmp_path: Path) -> None:
    """The process was killed between an append and its answer."""
    lab = Lab(tmp_path)
    fill(lab.spool, 10)
    lab.stream.append(lab.spool.read(1, max_bytes=999, max_records=6), floor=1)
    lab.courier = lab.meet(Spool(tmp_path, section()))
    lab.drain()
    assert lab.stream.calls[1:] == [("progress", 0), ("append", 4)]
    assert lab.stored == [10 * seq for seq in range(1, 11)], "their leases need no renewing either"
    assert lab.numbers() == list(range(1, 11))


def test_a_server_that_forgot_is_given_the_same_again(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    fill(lab.spool, 4)
    lab.drain()
    before = lab.stream.store.save()
    fill(lab.spool, 5)
    lab.drain()
    lab.stream.store.restore(before)
    with capture_logs() as logs:
        fill(lab.spool, 1)
        lab.drain()
    assert lab.numbers() == list(range(1, 11))
    assert [(line["event"], line["groups"]) for line in logs] == [
        ("the stream has forgotten groups that it took; giving them again", 5)
    ]


def test_a_server_that_forgot_is_noticed_although_nothing_is_to_be_given(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    before = lab.stream.store.save()
    fill(lab.spool, 9)
    lab.drain()
    lab.stream.store.restore(before)
    assert not lab.turn(after_s=ASK_EVERY_S / 2)
    assert lab.numbers() == []
    lab.turn(after_s=ASK_EVERY_S / 2)
    assert lab.numbers() == list(range(1, 10))


def test_it_keeps_a_group_until_the_learner_has_settled_it(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    fill(lab.spool, 3)
    lab.drain()
    lab.turn(after_s=10)
    assert lab.spool.floor == 1
    held = lab.stream.read(LEARNER_GROUP, "c", max_entries=9, block_ms=0)
    lab.stream.settle(LEARNER_GROUP, [(held[i].entry_id, "trained") for i in (0, 2)])
    lab.turn(after_s=10)
    assert (lab.spool.floor, lab.courier.state) == (2, CourierState.SETTLING)
    lab.stream.settle(LEARNER_GROUP, [(held[1].entry_id, "dropped:age")])
    lab.turn(after_s=10)
    assert (lab.spool.floor, lab.courier.state) == (4, CourierState.EMPTY)


def test_it_lets_go_late_and_gives_again_what_a_server_forgot_of_the_settled(tmp_path: Path) -> None:
    lab = Lab(tmp_path, release_after_s=5)
    fill(lab.spool, 4)
    lab.drain()
    settle_all(lab.stream)
    before = lab.stream.store.save()
    fill(lab.spool, 2)
    lab.drain()
    settle_all(lab.stream)
    for _ in range(4):
        lab.turn(after_s=1)
    assert lab.spool.floor == 1
    lab.stream.store.restore(before)
    lab.turn(after_s=1)
    assert lab.numbers() == [5, 6]
    lab.turn(after_s=1)
    assert lab.spool.floor == 5, "what it still calls settled may go"
    settle_all(lab.stream)
    for _ in range(7):
        lab.turn(after_s=1)
    assert lab.courier.state is CourierState.EMPTY


def test_a_reading_is_no_older_than_its_answer(tmp_path: Path) -> None:
    """The process was stopped, or the server, while it asked: what is settled may have been settled just now."""
    lab = Lab(tmp_path, release_after_s=5)
    fill(lab.spool, 1)
    lab.drain()
    progress = lab.stream.progress

    def slow(producer: str) -> ProducerProgress:
        lab.now += 60
        settle_all(lab.stream)
        return progress(producer)

    lab.stream.progress = slow  # type: ignore[method-assign]
    lab.turn(after_s=1)
    lab.stream.progress = progress  # type: ignore[method-assign]
    for _ in range(4):
        lab.turn(after_s=1)
        assert lab.spool.floor == 1
    lab.turn(after_s=1)
    assert lab.spool.floor == 2


def test_an_outage_begins_the_wait_anew(tmp_path: Path) -> None:
    lab = Lab(tmp_path, release_after_s=5)
    fill(lab.spool, 2)
    lab.drain()
    settle_all(lab.stream)
    for _ in range(4):
        lab.turn(after_s=1)
    lab.courier.interrupt(away=True)
    lab.turn(after_s=60)
    assert lab.spool.floor == 1
    lab.courier.interrupt(away=False)  # full: it has not gone away
    lab.turn(after_s=5)
    assert lab.spool.floor == 3


def test_after_a_failure_it_asks_first_and_begins_with_one_record(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    fill(lab.spool, 70)
    lab.stream.plan = ["full"]
    with pytest.raises(BackpressureError):
        lab.drain()
    lab.courier.interrupt(away=False)
    lab.stream.calls.clear()
    lab.drain()
    assert [n for kind, n in lab.stream.calls if kind == "append"] == [1, 2, 4, 8, 16, 32, 7]
    assert lab.stream.calls[0] == ("progress", 0)


def test_a_stream_that_answers_and_takes_nothing_is_a_failure(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    fill(lab.spool, 2)
    lab.stream.append = lambda envelopes, *, floor: 1  # type: ignore[method-assign]
    with pytest.raises(StreamUnavailableError, match="took nothing of east-00-abc123/1"):
        lab.drain()


def test_a_group_that_no_entry_can_hold_is_a_fault_of_the_configuration(tmp_path: Path) -> None:
    lab = Lab(tmp_path, max_entry_bytes=1024)
    fill(lab.spool, 1, size=2000)
    with pytest.raises(ConfigError, match=r"a group in the spool .* raise stream.max_entry_bytes"):
        lab.drain()


def test_a_gap_in_the_files_is_no_gap_in_the_stream(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    fill(lab.spool, 5)
    path = segments(tmp_path)[0]
    content = bytearray(path.read_bytes())
    content[SEGMENT_HEADER + 2 * (RECORD_HEADER + 20) + 1] ^= 1  # record 3
    path.write_bytes(content)
    lab.courier = lab.meet(Spool(tmp_path, section()))
    lab.drain()
    found = fresh(lab.stream)
    assert [e.seq for e in found] == [1, 2, 3, 4, 5]
    assert [e.seq for e in found if e.payload.startswith(b"unreadable")] == [3]


def test_numbers_that_the_stream_knows_and_the_spool_does_not_are_never_used_again(tmp_path: Path) -> None:
    """Else the stream would refuse the new groups as repeated, and they would count as sent."""
    lab = Lab(tmp_path)
    fill(lab.spool, 8)
    lab.drain()
    lost = segments(tmp_path)[0]
    with lost.open("r+b") as file:
        file.truncate(SEGMENT_HEADER + 5 * (RECORD_HEADER + 20))  # as after a power cut
    spool = Spool(tmp_path, section())
    spool.append(99, b"new")
    lab.courier = lab.meet(spool)
    with capture_logs() as logs:
        lab.drain()
    spool.append(100, b"newer")
    lab.drain()
    found = fresh(lab.stream)
    assert [(e.seq, e.group_index) for e in found][7:] == [(8, 80), (9, 99), (10, 100)]
    assert (logs[0]["log_level"], logs[0]["groups_moved"], logs[0]["spool_ended"]) == ("error", 1, 6)
    settle_all(lab.stream)
    lab.turn(after_s=2)
    assert lab.courier.state is CourierState.EMPTY


EVENTS = ["ok", "ok", "away", "full", "half", "answer lost", "server dies", "settle", "restart"]


@given(st.lists(st.sampled_from(EVENTS), max_size=40), st.integers(1, 12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
def test_whatever_fails_each_group_is_stored_and_none_is_let_go_too_early(
    tmp_path_factory: pytest.TempPathFactory, plan: list[str], count: int
) -> None:
    """A server that dies comes back without its last 1.5 s; the spool lets go after 2."""
    folder = tmp_path_factory.mktemp("spool")
    lab = Lab(folder, release_after_s=2)
    settled: set[int] = set()
    saved = []
    for what in [*plan, *["ok"] * 30]:
        if lab.spool.next_seq <= count:
            fill(lab.spool, 1)
        saved.append((lab.now, lab.stream.store.save()))
        if what == "settle":
            settled |= {e.seq for e in settle_all(lab.stream)}
        elif what == "server dies":
            lab.stream.store.restore(next(books for t, books in saved if t >= lab.now - 1.5))
            saved.clear()
            lab.courier.interrupt(away=True)
        elif what == "restart":
            lab.spool.close()
            lab.spool = Spool(folder, section(max_bytes=2**20, segment_bytes=65536))
            lab.courier = lab.meet(lab.spool)
        else:
            lab.stream.plan = [what]
        try:
            lab.turn(after_s=0.3)
        except (StreamUnavailableError, BackpressureError) as error:
            lab.courier.interrupt(away=isinstance(error, StreamUnavailableError))
        entries = [int(fields[b"seq"]) for fields in lab.stream.store.entries.values()]
        assert entries == list(range(1, len(entries) + 1)), "once and in order"
    settled |= {e.seq for e in settle_all(lab.stream)}
    assert settled == set(range(1, count + 1))
    assert lab.stream.ledger(LEARNER_GROUP).produced == count
    assert set(lab.stored) == {10 * seq for seq in settled}
    for _ in range(6):
        lab.turn(after_s=1)
    assert lab.courier.state is CourierState.EMPTY
    lab.spool.close()
