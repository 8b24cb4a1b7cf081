"""A finished group leaves the outbox when, and only when, its stream has it: once, in order, or the process gives up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.producers.outbox import RETRY_LAST_S, Outbox
from anabranch.schemas.envelope import Envelope, open_envelope
from anabranch.schemas.errors import (
    BackpressureError,
    ConfigError,
    DeadlineError,
    StreamUnavailableError,
    TrajectoryError,
)
from anabranch.schemas.keys import LEARNER_GROUP, Keys
from anabranch.schemas.trajectory import decode_group
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.memory_stream import MemoryStream, MemoryStreamStore
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_stream import RedisStream
from anabranch.transport.stream import TrajectoryStream
from tests.contract.flaky_link import FlakyLink
from tests.groups import group, rollout


class Rough(MemoryStream):
    """Fails as told: before it stores, or after (the answer is lost)."""

    def __init__(self, store: MemoryStreamStore) -> None:
        super().__init__(store)
        self.plan: list[str] = []
        self.calls = 0

    def append(self, envelope: Envelope) -> bool:
        self.calls += 1
        what = self.plan.pop(0) if self.plan else "ok"
        if what == "away":
            raise StreamUnavailableError("the region cannot be reached")
        if what == "full":
            raise BackpressureError("the region is full")
        stored = super().append(envelope)
        if what == "answer lost":
            raise StreamUnavailableError("no answer")
        return stored


class Lab:
    def __init__(self, deadline_s: float = 120.0) -> None:
        self.now_s = 50.0
        self.stream = Rough(MemoryStreamStore())
        self.outbox = outbox(self.stream, deadline_s=deadline_s, clock=lambda: self.now_s)


def outbox(stream: TrajectoryStream, *, deadline_s: float = 60.0, clock=time.monotonic) -> Outbox:
    return Outbox(stream, "east-1", region="east", deadline_s=deadline_s, clock=clock)


def stored(stream: TrajectoryStream) -> list[tuple[int, int]]:
    """(sequence number, group index) of every entry that nobody has read yet."""
    deliveries = stream.read(LEARNER_GROUP, "c", max_entries=1000, block_ms=0)
    envelopes = [open_envelope(d.fields, max_entry_bytes=1 << 24) for d in deliveries]
    assert all(decode_group(e.payload).group_index == e.group_index for e in envelopes)
    return [(e.seq, e.group_index) for e in envelopes]


def test_groups_are_stored_in_order_under_ascending_numbers() -> None:
    lab = Lab()
    for index in (7, 3, 9):
        lab.outbox.put(group(index))
    assert len(lab.outbox) == 3
    assert lab.outbox.flush() == [7, 3, 9]
    assert lab.outbox.flush() == []
    assert stored(lab.stream) == [(1, 7), (2, 3), (3, 9)]


def test_a_group_that_no_entry_can_hold_is_a_fault_of_the_configuration() -> None:
    """Exit 78: with any other code the producers would be restarted, sample it again and die of it one by one."""
    small = outbox(MemoryStream(MemoryStreamStore(), max_entry_bytes=1024))
    small.put(group(7))
    with pytest.raises(ConfigError, match=r"group 7 does not fit .*group_size .*max_tokens, .*stream.max_entry_bytes"):
        small.flush()


def test_an_unreachable_stream_keeps_everything_and_is_tried_ever_more_rarely() -> None:
    lab = Lab()
    lab.stream.plan = ["away"] * 100
    lab.outbox.put(group(0))
    attempts = []
    for _ in range(400):
        before = lab.stream.calls
        assert lab.outbox.flush() == []
        if lab.stream.calls > before:
            attempts.append(lab.now_s)
        lab.now_s += 0.1
    pauses = np.diff(attempts)
    assert (pauses >= 0.09).all()
    assert pauses.max() < RETRY_LAST_S + 0.2
    assert (np.diff(pauses) > -0.15).all(), "no shorter pause follows a longer one"
    assert len(attempts) < 15
    assert (len(lab.outbox), lab.outbox.error) == (1, "the region cannot be reached")


def test_when_the_stream_is_back_everything_goes_in_order_and_the_error_with_it() -> None:
    lab = Lab()
    lab.stream.plan = ["ok", "away"]
    for index in range(4):
        lab.outbox.put(group(index))
    assert lab.outbox.flush() == [0]
    assert lab.outbox.flush() == [], "not yet time to try again"
    lab.outbox.put(group(4))
    lab.now_s += 1
    assert lab.outbox.flush() == [1, 2, 3, 4]
    assert (stored(lab.stream), lab.outbox.error) == ([(i + 1, i) for i in range(5)], "")


def test_a_lost_answer_stores_nothing_twice() -> None:
    lab = Lab()
    lab.stream.plan = ["answer lost", "answer lost"]
    lab.outbox.put(group(5))
    lab.outbox.put(group(6))
    done = []
    for _ in range(3):
        done += lab.outbox.flush()
        lab.now_s += 10
    assert done == [5, 6]
    assert stored(lab.stream) == [(1, 5), (2, 6)]
    assert lab.stream.ledger(LEARNER_GROUP).produced == 2


def test_a_full_stream_is_waited_for_like_an_unreachable_one() -> None:
    lab = Lab()
    lab.stream.plan = ["full", "full"]
    lab.outbox.put(group(0))
    assert lab.outbox.flush() == []
    assert lab.outbox.error == "the region is full"
    lab.now_s += 1
    assert lab.outbox.flush() == []
    lab.now_s += 1
    assert lab.outbox.flush() == [0]


def test_at_the_deadline_the_process_gives_up_and_says_what_for() -> None:
    lab = Lab(deadline_s=30)
    lab.stream.plan = ["away"] * 1000
    lab.outbox.put(group(0))
    lab.outbox.put(group(1))
    with pytest.raises(DeadlineError, match="region east with 2 groups to append; the region cannot be reached"):
        run_on(lab)
    assert 80 < lab.now_s < 50 + 30 + RETRY_LAST_S + 1


def run_on(lab: Lab) -> None:
    for _ in range(1000):
        lab.outbox.flush()
        lab.now_s += 0.5


def test_the_deadline_begins_anew_with_every_success() -> None:
    lab = Lab(deadline_s=3)
    for index in range(20):
        lab.outbox.put(group(index))
        lab.stream.plan = ["away", "away", "ok"]
        for _ in range(3):
            lab.outbox.flush()
            lab.now_s += 0.5
    assert len(lab.outbox) == 0


def test_a_malformed_group_is_refused_at_once_and_costs_no_number() -> None:
    lab = Lab()
    bad = replace(group(1), rollouts=(replace(rollout(), reward=float("nan")),))
    with pytest.raises(TrajectoryError, match="reward is nan"):
        lab.outbox.put(bad)
    lab.outbox.put(group(2))
    assert lab.outbox.flush() == [2]
    assert stored(lab.stream) == [(1, 2)]


@given(st.lists(st.sampled_from(["ok", "away", "full", "answer lost"]), max_size=30), st.integers(1, 8))
def test_whatever_fails_each_group_is_stored_once_and_in_order(plan: list[str], count: int) -> None:
    lab = Lab(deadline_s=10_000)
    lab.stream.plan = list(plan)
    done: list[int] = []
    for index in range(count):
        lab.outbox.put(group(index))
        done += lab.outbox.flush()
        lab.now_s += 0.05
    while len(lab.outbox):
        done += lab.outbox.flush()
        lab.now_s += 1
    assert done == list(range(count))
    assert stored(lab.stream) == [(i + 1, i) for i in range(count)]


# Real servers.


def flush_all(box: Outbox, deadline_s: float = 20) -> None:
    end = time.monotonic() + deadline_s
    while len(box):
        assert time.monotonic() < end, box.error
        box.flush()
        time.sleep(0.01)


@pytest.fixture
def flaky(valkey: EmbeddedValkey, keys: Keys) -> Iterator[tuple[FlakyLink, RedisStream]]:
    link = FlakyLink(valkey.port)
    url = valkey.url.replace(str(valkey.port), str(link.port))
    stream = RedisStream(connect(url, deadline_s=10, what="the region"), keys)
    yield link, stream
    stream.close()
    link.close()


@pytest.mark.process
def test_real_answers_lost_on_the_way(flaky) -> None:
    link, stream = flaky
    box = outbox(stream)
    box.put(group(0))
    flush_all(box)
    link.lose_replies(b"east-1", times=2)
    for index in range(1, 4):
        box.put(group(index))
    flush_all(box)
    assert link.lost == 2
    assert stored(stream) == [(i + 1, i) for i in range(4)]


@pytest.mark.process
def test_a_killed_server_that_comes_back(tmp_path: Path, keys: Keys) -> None:
    with EmbeddedValkey(tmp_path / "region") as server:
        stream = RedisStream(connect(server.url, deadline_s=10, what="the region"), keys)
        box = outbox(stream)
        box.put(group(0))
        flush_all(box)
        server.kill()
        box.put(group(1))
        assert box.flush() == []
        assert server.password not in box.error
        assert str(server.port) in box.error
        server.start()
        flush_all(box)
        assert stored(stream) == [(1, 0), (2, 1)]
        stream.close()


@pytest.mark.process
def test_a_server_at_its_memory_limit(tmp_path: Path, keys: Keys) -> None:
    with EmbeddedValkey(tmp_path / "region", maxmemory_bytes=6 * 2**20, fsync="everysec") as server:
        stream = RedisStream(connect(server.url, deadline_s=10, what="the region"), keys)
        box = outbox(stream)
        for index in range(40):
            box.put(replace(group(index), prompt_text="x" * 200_000))
        fitted = box.flush()
        assert 0 < len(fitted) < 40
        assert "takes no more data" in box.error
        got = stored(stream)
        assert len(got) == len(fitted)
        while len(box):  # the learner catches up
            got += settle_all(stream)
            box.flush()
            time.sleep(0.02)
        got += settle_all(stream)
        assert got == [(i + 1, i) for i in range(40)]
        stream.close()


def settle_all(stream: RedisStream) -> list[tuple[int, int]]:
    fresh = stored(stream)
    held = stream.read_own_pending(LEARNER_GROUP, "c", max_entries=1000)
    stream.settle(LEARNER_GROUP, [(d.entry_id, "trained") for d in held])
    stream.trim()
    return fresh
