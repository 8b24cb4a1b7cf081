"""One region's thread: bounded ahead, patient with a region that is away, and the one who acknowledges."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from anabranch.consumers import region_reader
from anabranch.consumers.region_reader import RegionState
from anabranch.schemas.envelope import Envelope
from anabranch.schemas.errors import BackpressureError, StreamUnavailableError, TemporaryError
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.schemas.trajectory import encode_group
from anabranch.transport.memory_stream import MemoryStream
from anabranch.transport.stream import Delivery, LedgerCounts
from tests.groups import entry, group
from tests.readers import Regions, drain, indices, until, wait
from tests.streams import put


@pytest.fixture
def world() -> Iterator[Regions]:
    with Regions("east") as made:
        yield made


class Faulty(MemoryStream):
    """Calls named in `faults` fail."""

    faults: dict[str, TemporaryError]
    failed = 0

    def read(self, group: str, consumer: str, *, max_entries: int, block_ms: int) -> list[Delivery]:
        self._check("read")
        return super().read(group, consumer, max_entries=max_entries, block_ms=block_ms)

    def settle(self, group: str, fates: Sequence[tuple[str, str]]) -> int:
        self._check("settle")
        return super().settle(group, fates)

    def trim(self) -> int:
        self._check("trim")
        return super().trim()

    def dead_letter(self, group: str, delivery: Delivery, cause: str) -> None:
        self._check("dead_letter")
        super().dead_letter(group, delivery, cause)

    def ledger(self, group: str) -> LedgerCounts:
        self._check("ledger")
        return super().ledger(group)

    def _check(self, call: str) -> None:
        if call in self.faults:
            self.failed += 1
            raise self.faults[call]


def faulty(world: Regions, **faults: TemporaryError) -> Faulty:
    stream = Faulty(world.stores["east"])
    stream.faults = faults
    return stream


AWAY = StreamUnavailableError("lost the region")
FULL = BackpressureError("takes no writes")


def pending(world: Regions) -> int:
    return world.stream("east").ledger(LEARNER_GROUP).pending


def test_what_was_fetched_when_the_region_broke_off_is_opened_when_it_is_back(world: Regions) -> None:
    stream = faulty(world, dead_letter=AWAY)
    put(stream, entry(1))
    world.stores["east"].add({b"nonsense": b"1"})
    put(stream, entry(2))
    reader = world.reader(streams={"east": stream})
    first = drain(reader)
    assert (indices(first), first.dead) == ([1], [])
    assert reader.unreachable() == {"east": "lost the region"}
    stream.faults = {}
    world.now_s += 60
    rest = until(reader, lambda polled: polled.arrivals)
    assert (indices(rest), len(rest.dead)) == ([2], 1)
    assert pending(world) == 2


def test_health_says_since_when_and_why(world: Regions) -> None:
    stream = faulty(world, read=AWAY)
    reader = world.reader(streams={"east": stream})
    drain(reader)
    world.now_s += 0.25  # before it is asked again
    health = reader.health()["east"]
    assert (health.state, health.for_s, health.why) == (RegionState.UNREACHABLE, 0.25, "lost the region")
    assert str(replace(health, for_s=300.0)) == "unreachable for 300 s (lost the region)"
    stream.faults = {}
    world.now_s += 60
    wait(lambda: reader.health()["east"].state is RegionState.READING, "the region to be read")
    assert reader.health()["east"].why == ""


def test_a_region_that_stays_away_is_asked_at_least_every_three_seconds(world: Regions) -> None:
    asked: list[float] = []

    class Away(MemoryStream):
        def read_own_pending(
            self, group: str, consumer: str, *, max_entries: int, after_id: str = "0"
        ) -> list[Delivery]:
            asked.append(world.now_s)
            raise AWAY

    reader = world.reader(streams={"east": Away(world.stores["east"])})
    drain(reader)
    for _ in range(200):
        before = len(asked)
        world.now_s += 0.5
        if world.now_s - asked[-1] >= 3.0:
            wait(lambda: len(asked) > before, "another try")  # noqa: B023
    pauses = [b - a for a, b in itertools.pairwise(asked)]
    assert len(asked) > 20
    assert max(pauses) <= 3.5


def big(index: int) -> Envelope:
    return Envelope("p", index, index, encode_group(replace(group(index), prompt_text="x" * 100_000)))


def test_it_reads_ahead_no_more_than_it_may_and_goes_on_when_there_is_room(world: Regions) -> None:
    put(world.stream("east"), *(big(i) for i in range(60)))
    reader = world.reader(read_ahead_bytes=2**20)
    reader.mark()  # starts it
    wait(lambda: reader.health()["east"].state is RegionState.FULL, "the region to be read ahead")
    (lag,) = world.stream("east").state().groups
    size = len(big(0).payload)
    assert 2**20 <= lag.pending * size < 2**20 + 4 * size
    assert [a.group.group_index for a in drain(reader).arrivals] == list(range(60))


def test_fates_are_settled_and_what_they_cover_is_trimmed(world: Regions) -> None:
    put(world.stream("east"), entry(0), entry(1), entry(2))
    reader = world.reader()
    first, second, _ = drain(reader).arrivals
    reader.settle("east", [(first.entry_id, "trained"), (second.entry_id, "dropped:age")])
    assert reader.flush(deadline_s=20)
    assert reader.unsettled() == set()
    wait(lambda: world.stream("east").state().entries == 1, "the trim")
    counts = world.stream("east").ledger(LEARNER_GROUP)
    assert (counts.fates, counts.pending) == ({"trained": 1, "dropped:age": 1}, 1)


def test_what_is_to_be_settled_waits_for_a_region_that_is_away(world: Regions) -> None:
    stream = faulty(world)
    put(stream, entry(0))
    reader = world.reader(streams={"east": stream})
    (arrival,) = drain(reader).arrivals
    stream.faults = {"settle": AWAY}
    reader.settle("east", [(arrival.entry_id, "trained")])
    wait(reader.unreachable, "the loss to be seen")
    assert reader.flush(deadline_s=20), "nobody waits for it"
    assert reader.unsettled() == {("east", arrival.entry_id)}
    stream.faults = {}
    world.now_s += 60
    wait(lambda: not reader.unsettled(), "the acknowledgement")
    assert stream.ledger(LEARNER_GROUP).fates == {"trained": 1}


def test_a_refusal_to_acknowledge_is_told_once(world: Regions) -> None:
    """A disk that is full for days must not fill the log as well."""
    stream = faulty(world)
    put(stream, entry(0))
    with capture_logs() as logs:
        reader = world.reader(streams={"east": stream})
        (arrival,) = drain(reader).arrivals
        stream.faults = {"settle": FULL}
        reader.settle("east", [(arrival.entry_id, "trained")])

        def refused_often() -> bool:
            world.now_s += 5
            return stream.failed >= 5

        wait(refused_often, "five refusals")
        world.die()
    assert [log["event"] for log in logs].count("cannot acknowledge yet") == 1


@pytest.mark.parametrize("call", ["settle", "trim"])
def test_a_region_that_takes_no_writes_is_read_all_the_same(world: Regions, call: str) -> None:
    stream = faulty(world)
    put(stream, entry(0))
    reader = world.reader(streams={"east": stream})
    (arrival,) = drain(reader).arrivals
    stream.faults = {call: FULL}
    reader.settle("east", [(arrival.entry_id, "trained")])
    put(stream, entry(1))
    assert indices(until(reader, lambda polled: polled.arrivals)) == [1]
    assert reader.unreachable() == {}
    stream.faults = {}

    def done() -> bool:
        world.now_s += 1
        return stream.ledger(LEARNER_GROUP).fates == {"trained": 1} and stream.state().entries == 1

    wait(done, "the rest")


def test_the_ledger_is_read_as_often_as_asked_and_says_what_is_on_its_way(world: Regions) -> None:
    stream = faulty(world)
    put(stream, entry(0))
    reader = world.reader(streams={"east": stream}, ledger_every_s=10)
    (arrival,) = drain(reader).arrivals
    assert reader.counted()["east"].counts == LedgerCounts(1, 1)
    stream.faults = {"settle": FULL}
    reader.settle("east", [(arrival.entry_id, "trained")])
    world.now_s += 11
    wait(lambda: reader.counted()["east"].at_s == world.now_s, "the next reading")
    assert (reader.counted()["east"].counts, reader.counted()["east"].unsettled) == (LedgerCounts(1, 1), 1)
    stream.faults = {}

    def counted() -> bool:
        world.now_s += 1
        return reader.counted()["east"].counts == LedgerCounts(1, 0, {"trained": 1})

    wait(counted, "the fate to be counted")


def test_one_read_brings_no_more_than_is_quick(world: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much may be read ahead: large replies are slower by the byte."""
    brought: list[int] = []

    class Watched(MemoryStream):
        def read(self, group: str, consumer: str, *, max_entries: int, block_ms: int) -> list[Delivery]:
            found = super().read(group, consumer, max_entries=max_entries, block_ms=block_ms)
            brought.append(sum(len(delivery.fields[b"payload"]) for delivery in found))
            return found

    size = len(big(0).payload)
    monkeypatch.setattr(region_reader, "MAX_READ_BYTES", 4 * size)
    put(world.stream("east"), *(big(i) for i in range(60)))
    polled = drain(world.reader(streams={"east": Watched(world.stores["east"])}))
    assert indices(polled) == list(range(60))
    assert max(brought) == 4 * size
