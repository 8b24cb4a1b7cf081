"""What a consumer may rely on: every entry once, as a verified group or a dead letter; no region waits for another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.consumers.arrivals import Polled
from anabranch.consumers.region_reader import RegionState
from anabranch.schemas.envelope import Envelope
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.schemas.trajectory import encode_group
from anabranch.transport.memory_stream import MemoryStream
from anabranch.transport.stream import Delivery
from tests.groups import entry, group, rollout
from tests.readers import VOCABULARY, Regions, drain, indices, until
from tests.streams import put


@pytest.fixture
def world() -> Iterator[Regions]:
    with Regions("east", "west") as made:
        yield made


def wire(envelope: Envelope) -> dict[bytes, bytes]:
    return {name.encode(): value for name, value in envelope.seal().items()}


def test_groups_of_every_region_arrive_with_where_to_acknowledge_them(world: Regions) -> None:
    for index in range(3):
        put(world.stream("east"), entry(index))
    put(world.stream("west"), entry(9))
    polled = drain(world.reader())
    assert indices(polled) == [0, 1, 2, 9]
    assert {a.region for a in polled.arrivals} == {"east", "west"}
    for arrival in polled.arrivals:
        assert world.stream(arrival.region).settle(LEARNER_GROUP, [(arrival.entry_id, "trained")]) == 1
        assert arrival.size_bytes > 0


def test_an_arrival_says_when_it_was_read(world: Regions) -> None:
    put(world.stream("east"), entry(0))
    before = time.time_ns() // 1_000_000
    (arrival,) = drain(world.reader()).arrivals
    assert before <= arrival.delivered_ms <= time.time_ns() // 1_000_000
    assert arrival.admitted_ms == 0


def test_more_entries_than_one_read_takes_all_arrive_in_order(world: Regions) -> None:
    for index in range(600):
        put(world.stream("east"), entry(index))
    polled = drain(world.reader())
    assert [a.group.group_index for a in polled.arrivals] == list(range(600))


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
def test_an_unreadable_entry_is_set_aside_with_its_cause_and_the_others_flow_on(world: Regions, fault: str) -> None:
    make, cause, known_index = FAULTS[fault]
    stream = world.stream("east")
    put(stream, entry(1))
    world.stores["east"].add(make())
    put(stream, entry(2))
    put(world.stream("west"), entry(3))
    polled = drain(world.reader(max_entry_bytes=4096))
    assert indices(polled) == [1, 2, 3]
    (dead,) = polled.dead
    assert cause in dead.cause
    assert (dead.region, dead.group_index) == ("east", known_index)
    (letter,) = world.stores["east"].dead_letters
    assert cause in letter[b"cause"].decode()
    assert stream.ledger(LEARNER_GROUP).fates == {"dropped:dead_letter": 1}
    assert stream.ledger(LEARNER_GROUP).pending == 2
    world.die()
    assert indices(drain(world.reader())) == [1, 2, 3], "a restart does not meet it again"


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["good", *FAULTS]), max_size=20))
def test_whatever_arrives_each_entry_comes_out_once(kinds: list[str]) -> None:
    with Regions("east", "west") as world:
        check_that_each_comes_out_once(world, kinds)


def check_that_each_comes_out_once(world: Regions, kinds: list[str]) -> None:
    for number, kind in enumerate(kinds):
        region = ("east", "west")[number % 2]
        if kind == "good":
            put(world.stream(region), entry(100 + number))
        else:
            world.stores[region].add(FAULTS[kind][0]())
    reader = world.reader(max_entry_bytes=4096)
    polled = drain(reader)
    assert indices(polled) == [100 + n for n, kind in enumerate(kinds) if kind == "good"]
    assert len(polled.dead) == sum(kind != "good" for kind in kinds)
    assert drain(reader) == Polled()


def test_a_restarted_consumer_begins_with_what_it_had_not_settled(world: Regions) -> None:
    for index in range(100):
        put(world.stream("east"), entry(index))
    first = drain(world.reader())
    world.die()
    world.stream("east").settle(LEARNER_GROUP, [(a.entry_id, "trained") for a in first.arrivals[:70]])
    put(world.stream("east"), entry(100))
    reader = world.reader()
    assert {h.state for h in reader.health().values()} == {RegionState.CONNECTING}
    assert indices(drain(reader)) == list(range(70, 101))
    assert {h.state for h in reader.health().values()} == {RegionState.READING}


def test_entries_of_a_dead_consumer_are_taken_over_when_they_have_been_idle(world: Regions) -> None:
    put(world.stream("east"), entry(0))
    assert indices(drain(world.reader("dead"))) == [0]
    heir = world.reader("alive", claim_idle_ms=60_000)
    assert indices(drain(heir)) == []
    world.now_s += 61
    assert indices(drain(heir)) == [0]
    world.now_s += 61
    assert indices(drain(heir)) == [], "its own it does not claim again"


def test_an_entry_that_kills_its_consumer_every_time_ends_as_a_dead_letter(world: Regions) -> None:
    put(world.stream("east"), entry(0))
    outcomes = []
    for _ in range(4):
        outcomes.append(drain(world.reader(max_deliveries=3)))
        world.die()
    assert [indices(o) for o in outcomes] == [[0], [0], [0], []]
    assert "delivered 4 times" in outcomes[-1].dead[0].cause
    assert world.stream("east").ledger(LEARNER_GROUP).balanced


def test_what_comes_to_one_region_does_not_wait_for_another(world: Regions) -> None:
    """Its read is under way for as long as the test likes: a black hole, until the socket time-out."""
    answer = threading.Event()

    class Hole(MemoryStream):
        def read(self, group: str, consumer: str, *, max_entries: int, block_ms: int) -> list[Delivery]:
            answer.wait(60)
            return super().read(group, consumer, max_entries=max_entries, block_ms=block_ms)

    try:
        reader = world.reader(streams={"east": world.stream("east"), "west": Hole(world.stores["west"])})
        put(world.stream("west"), entry(9))
        for index in range(3):
            put(world.stream("east"), entry(index))
            assert indices(until(reader, lambda polled: polled.arrivals)) == [index]
    finally:
        answer.set()
    assert indices(until(reader, lambda polled: polled.arrivals)) == [9]


def test_what_a_thread_dies_of_is_raised_where_the_reader_is_polled(world: Regions) -> None:
    class Wrong(MemoryStream):
        def read(self, group: str, consumer: str, *, max_entries: int, block_ms: int) -> list[Delivery]:
            raise ZeroDivisionError("a mistake of ours")

    reader = world.reader(streams={"east": world.stream("east"), "west": Wrong(world.stores["west"])})
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        until(reader, lambda polled: False)
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        reader.poll(block_ms=1)


def test_a_poll_without_anything_returns_empty_after_its_time(world: Regions) -> None:
    assert world.reader().poll(block_ms=5) == Polled()


def test_a_closed_reader_has_no_threads_left(world: Regions) -> None:
    before = threading.active_count()
    reader = world.reader()
    drain(reader)
    assert threading.active_count() == before + 2
    reader.close()
    assert threading.active_count() == before
    assert {h.state for h in reader.health().values()} == {RegionState.CLOSED}
