"""What a consumer may rely on: every entry once, as a verified group or a dead letter; no region waits for another."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.consumers.reader import Polled, Reader, RegionState
from anabranch.schemas.config import StreamSection
from anabranch.schemas.envelope import Envelope
from anabranch.schemas.errors import BackpressureError, StreamUnavailableError
from anabranch.schemas.keys import LEARNER_GROUP, Keys
from anabranch.schemas.trajectory import encode_group
from anabranch.transport.embedded_valkey import EmbeddedValkey
from anabranch.transport.memory_stream import MemoryStream, MemoryStreamStore
from anabranch.transport.redis_client import connect
from anabranch.transport.redis_stream import RedisStream
from anabranch.transport.stream import Delivery, TrajectoryStream
from tests.groups import entry, group, rollout

VOCABULARY = 100


class World:
    """Regions in memory, and readers over them."""

    def __init__(self, *regions: str) -> None:
        self.now_s = 1000.0
        self.stores = {name: MemoryStreamStore(clock=lambda: self.now_s) for name in regions}

    def stream(self, region: str) -> MemoryStream:
        return MemoryStream(self.stores[region])

    def reader(self, consumer: str = "learner-0", **config: int) -> Reader:
        streams = {name: self.stream(name) for name in self.stores}
        section = StreamSection(block_ms=1, **config)
        return Reader(
            streams,
            run="run",
            group=LEARNER_GROUP,
            consumer=consumer,
            config=section,
            vocabulary=VOCABULARY,
            clock=lambda: self.now_s,
        )


def drain(reader: Reader, *, rounds: int = 4) -> Polled:
    """Everything that `rounds` polls bring."""
    total = Polled()
    for _ in range(rounds):
        polled = reader.poll(block_ms=1)
        total.arrivals.extend(polled.arrivals)
        total.dead.extend(polled.dead)
    return total


def indices(polled: Polled) -> list[int]:
    return sorted(a.group.group_index for a in polled.arrivals)


def wire(envelope: Envelope) -> dict[bytes, bytes]:
    return {name.encode(): value for name, value in envelope.seal().items()}


def test_groups_of_every_region_arrive_with_where_to_acknowledge_them() -> None:
    world = World("east", "west")
    for index in range(3):
        world.stream("east").append(entry(index))
    world.stream("west").append(entry(9))
    polled = drain(world.reader())
    assert indices(polled) == [0, 1, 2, 9]
    assert {a.region for a in polled.arrivals} == {"east", "west"}
    for arrival in polled.arrivals:
        assert world.stream(arrival.region).settle(LEARNER_GROUP, [(arrival.entry_id, "trained")]) == 1
        assert arrival.size_bytes > 0


def test_more_entries_than_one_read_takes_all_arrive_in_order() -> None:
    world = World("east")
    for index in range(150):
        world.stream("east").append(entry(index))
    polled = drain(world.reader())
    assert [a.group.group_index for a in polled.arrivals] == list(range(150))


def damaged(payload_of: bytes, **fields: bytes) -> dict[bytes, bytes]:
    return {**wire(Envelope("p", 5, 5, payload_of)), **{k.encode(): v for k, v in fields.items()}}


GOOD = encode_group(group(5))


def nan_payload() -> bytes:
    """A group whose log-prob is a NaN, sealed with a right checksum: as a broken producer would send it."""
    marked = encode_group(replace(group(5), rollouts=(replace(rollout(), logprobs=np.float32([-0.5, -0.7])),)))
    needle = np.float32([-0.5, -0.7]).tobytes()
    assert marked.count(needle) == 1
    return marked.replace(needle, np.float32([-0.5, np.nan]).tobytes())


FAULTS: dict[str, tuple[Callable[[], dict[bytes, bytes]], str, int | None]] = {
    "no envelope": (lambda: {b"nonsense": b"1"}, "SchemaVersionError", None),
    "another envelope version": (lambda: damaged(GOOD, v=b"9"), "SchemaVersionError", None),
    "bad checksum": (lambda: damaged(GOOD, payload=GOOD[:-1] + b"?"), "checksum mismatch", None),
    "truncated": (lambda: damaged(GOOD, payload=GOOD[:-8]), "its envelope says", None),
    "over the limit": (lambda: wire(Envelope("p", 5, 5, bytes(5000))), "over the limit", None),
    "not Arrow": (lambda: wire(Envelope("p", 5, 5, b"not arrow")), "not a trajectory batch", 5),
    "NaN log-prob": (lambda: wire(Envelope("p", 5, 5, nan_payload())), "log-prob is not finite", 5),
    "another run": (lambda: wire(Envelope("p", 5, 5, encode_group(group(5, run="other")))), "run 'other'", 5),
    "a token of another model": (
        lambda: wire(entry(5, prompt_token_ids=np.array([5, VOCABULARY], np.int32))),
        "token id 100 is beyond the model's vocabulary of 100",
        5,
    ),
    "group index of the envelope": (lambda: wire(Envelope("p", 5, 6, GOOD)), "group 5", 6),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_unreadable_entry_is_set_aside_with_its_cause_and_the_others_flow_on(fault: str) -> None:
    make, cause, known_index = FAULTS[fault]
    world = World("east", "west")
    stream = world.stream("east")
    stream.append(entry(1))
    world.stores["east"].add(make())
    stream.append(entry(2))
    world.stream("west").append(entry(3))
    polled = drain(world.reader(max_entry_bytes=4096))
    assert indices(polled) == [1, 2, 3]
    (dead,) = polled.dead
    assert cause in dead.cause
    assert (dead.region, dead.group_index) == ("east", known_index)
    (letter,) = world.stores["east"].dead_letters
    assert cause in letter[b"cause"].decode()
    assert stream.ledger(LEARNER_GROUP).fates == {"dropped:dead_letter": 1}
    assert stream.ledger(LEARNER_GROUP).pending == 2
    assert indices(drain(world.reader())) == [1, 2, 3], "a restart does not meet it again"


@given(st.lists(st.sampled_from(["good", *FAULTS]), max_size=20))
def test_whatever_arrives_each_entry_comes_out_once(kinds: list[str]) -> None:
    world = World("east", "west")
    for number, kind in enumerate(kinds):
        region = ("east", "west")[number % 2]
        if kind == "good":
            world.stream(region).append(entry(100 + number))
        else:
            world.stores[region].add(FAULTS[kind][0]())
    reader = world.reader(max_entry_bytes=4096)
    polled = drain(reader)
    assert indices(polled) == [100 + n for n, kind in enumerate(kinds) if kind == "good"]
    assert len(polled.dead) == sum(kind != "good" for kind in kinds)
    assert drain(reader) == Polled()


def test_a_restarted_consumer_begins_with_what_it_had_not_settled() -> None:
    world = World("east")
    for index in range(100):
        world.stream("east").append(entry(index))
    first = drain(world.reader())
    world.stream("east").settle(LEARNER_GROUP, [(a.entry_id, "trained") for a in first.arrivals[:70]])
    world.stream("east").append(entry(100))
    reader = world.reader()
    assert reader.health() == {"east": RegionState.RESUMING}
    assert indices(drain(reader)) == list(range(70, 101))
    assert reader.health() == {"east": RegionState.READING}


def test_entries_of_a_dead_consumer_are_taken_over_when_they_have_been_idle() -> None:
    world = World("east")
    world.stream("east").append(entry(0))
    assert indices(drain(world.reader("dead"))) == [0]
    heir = world.reader("alive", claim_idle_ms=60_000)
    assert indices(drain(heir)) == []
    world.now_s += 61
    assert indices(drain(heir)) == [0]
    world.now_s += 61
    assert indices(drain(heir)) == [], "its own it does not claim again"


def test_an_entry_that_kills_its_consumer_every_time_ends_as_a_dead_letter() -> None:
    world = World("east")
    world.stream("east").append(entry(0))
    outcomes = [drain(world.reader(max_deliveries=3), rounds=2) for _ in range(4)]
    assert [indices(o) for o in outcomes] == [[0], [0], [0], []]
    assert "delivered 4 times" in outcomes[-1].dead[0].cause
    assert world.stream("east").ledger(LEARNER_GROUP).balanced


class CutWhileBurying(MemoryStream):
    """The connection breaks at the first dead letter."""

    cut = True

    def dead_letter(self, group: str, delivery: Delivery, cause: str) -> None:
        if self.cut:
            self.cut = False
            raise StreamUnavailableError("lost the region")
        super().dead_letter(group, delivery, cause)


def test_what_was_fetched_when_the_region_broke_off_is_opened_when_it_is_back() -> None:
    store = MemoryStreamStore()
    stream = CutWhileBurying(store)
    stream.append(entry(1))
    store.add({b"nonsense": b"1"})
    stream.append(entry(2))
    now = [0.0]
    reader = Reader(
        {"east": stream}, run="run", group=LEARNER_GROUP, consumer="c", config=StreamSection(), clock=lambda: now[0]
    )
    first = reader.poll(block_ms=1)
    assert (indices(first), first.dead) == ([1], [])
    assert reader.unreachable() == {"east": "lost the region"}
    now[0] += 60
    rest = until(reader, lambda polled: len(polled.dead) == 1)
    assert indices(rest) == [2]
    assert stream.ledger(LEARNER_GROUP).pending == 2


def until(reader: Reader, done: Callable[[Polled], bool], *, deadline_s: float = 15) -> Polled:
    total = Polled()
    end = time.monotonic() + deadline_s
    while not done(total):
        assert time.monotonic() < end, f"nothing more within {deadline_s} s: {total}; {reader.unreachable()}"
        polled = reader.poll(block_ms=20)
        total.arrivals.extend(polled.arrivals)
        total.dead.extend(polled.dead)
    return total


# Real servers from here on.

TIMEOUT_MS = 1000
CONFIG = StreamSection(block_ms=20, socket_timeout_ms=TIMEOUT_MS)


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


def own_reader(streams: dict[str, TrajectoryStream], run_name: str) -> Reader:
    return Reader(streams, run=run_name, group=LEARNER_GROUP, consumer="learner-0", config=CONFIG)


@pytest.mark.process
def test_a_region_that_hangs_does_not_delay_the_others_and_catches_up(both, away, run_name) -> None:
    """A stopped server accepts connections and answers nothing, as a network that swallows packets."""
    reader = own_reader(both, run_name)
    both["away"].append(entry(0, run=run_name))
    until(reader, lambda p: indices(p) == [0])
    os.kill(away.pid, signal.SIGSTOP)
    reader.poll(block_ms=1)  # finds out, by the socket time-out
    assert list(reader.unreachable()) == ["away"]
    slowest_s = 0.0
    for index in range(1, 40):
        both["near"].append(entry(index, run=run_name))
        started = time.monotonic()
        assert indices(reader.poll(block_ms=20)) == [index]
        slowest_s = max(slowest_s, time.monotonic() - started)
        time.sleep(0.03)
    assert slowest_s < 0.7 * TIMEOUT_MS / 1000
    assert list(reader.unreachable()) == ["away"]
    os.kill(away.pid, signal.SIGCONT)
    both["away"].append(entry(99, run=run_name))
    assert indices(until(reader, lambda p: bool(p.arrivals))) == [99], "group 0 we still hold: it does not come again"
    assert reader.unreachable() == {}


@pytest.mark.process
def test_a_region_that_was_killed_comes_back_with_everything(both, away, run_name) -> None:
    reader = own_reader(both, run_name)
    for index in range(3):
        both["away"].append(entry(index, run=run_name))
    assert indices(until(reader, lambda p: len(p.arrivals) == 3)) == [0, 1, 2]
    both["away"].append(entry(3, run=run_name))
    away.kill()
    both["near"].append(entry(10, run=run_name))
    assert indices(until(reader, lambda p: bool(p.arrivals))) == [10]
    assert "away" in reader.unreachable()
    assert away.password not in str(reader.unreachable())
    away.start()
    assert indices(until(reader, lambda p: bool(p.arrivals))) == [3]
    again = own_reader(both, run_name)
    total = until(again, lambda p: len(p.arrivals) == 5)
    assert indices(total) == [0, 1, 2, 3, 10], "a new process reads all that is not settled"


@pytest.mark.process
def test_outages_alone_never_make_a_dead_letter(away, keys, run_name) -> None:
    """An entry waits for its checkpoint through any number of outages: only deliveries that ended in a crash count."""
    config = CONFIG.model_copy(update={"max_deliveries": 2})
    stream = open_stream(away, keys)
    now = [0.0]
    reader = Reader(
        {"away": stream}, run=run_name, group=LEARNER_GROUP, consumer="c", config=config, clock=lambda: now[0]
    )
    stream.append(entry(0, run=run_name))
    until(reader, lambda p: indices(p) == [0])
    for outage in range(3):
        away.kill()
        reader.poll(block_ms=1)
        assert reader.unreachable()
        away.start()
        now[0] += 60
        stream.append(entry(outage + 1, run=run_name))
        total = until(reader, lambda p: bool(p.arrivals))
        assert (indices(total), total.dead) == ([outage + 1], [])
        assert drain(reader) == Polled()
    stream.close()


@pytest.mark.process
def test_a_full_region_can_still_be_read_and_emptied(tmp_path, keys, run_name) -> None:
    with EmbeddedValkey(tmp_path / "full", maxmemory_bytes=6 * 2**20, fsync="everysec") as server:
        stream = open_stream(server, keys)
        big = replace(group(0, run=run_name), prompt_text="x" * 200_000)
        stream.read(LEARNER_GROUP, "learner-0", max_entries=1, block_ms=0)
        stored = 0
        with contextlib.suppress(BackpressureError):
            for index in range(100):
                stored += stream.append(Envelope("p", index, index, encode_group(replace(big, group_index=index))))
        assert 0 < stored < 100
        reader = own_reader({"full": stream}, run_name)
        total = until(reader, lambda p: len(p.arrivals) == stored)
        stream.settle(LEARNER_GROUP, [(a.entry_id, "trained") for a in total.arrivals])
        assert stream.trim() == stored
        assert stream.append(entry(stored, run=run_name))
        stream.close()
