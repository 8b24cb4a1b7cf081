"""A region that answers and refuses (credentials, a key of the wrong type) is one region's trouble, until it is everybody's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from structlog.testing import capture_logs

from anabranch.consumers.reader import Reader
from anabranch.consumers.region_reader import REFUSED_LAST_S, RegionState
from anabranch.schemas.errors import AnabranchError, ConfigError, StreamUnavailableError
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.transport.memory_stream import MemoryStream
from anabranch.transport.stream import Delivery, LedgerCounts
from tests.groups import entry
from tests.readers import Regions, drain, indices, until, wait
from tests.streams import put

REFUSED = ConfigError("the Redis of region west refused the credentials")
WRONG_TYPE = AnabranchError("the Redis of region west refused a command: WRONGTYPE")
AWAY = StreamUnavailableError("lost the Redis of region east")


class Refusing(MemoryStream):
    """Every read fails with `error`, while there is one."""

    error: Exception | None = None
    asked = 0

    def read_own_pending(self, group: str, consumer: str, *, max_entries: int, after_id: str = "0-0") -> list[Delivery]:
        self._check()
        return super().read_own_pending(group, consumer, max_entries=max_entries, after_id=after_id)

    def read(self, group: str, consumer: str, *, max_entries: int, block_ms: int) -> list[Delivery]:
        self._check()
        return super().read(group, consumer, max_entries=max_entries, block_ms=block_ms)

    def _check(self) -> None:
        self.asked += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def world() -> Iterator[Regions]:
    with Regions("east", "west") as made:
        yield made


def streams_of(world: Regions, **errors: Exception) -> dict[str, Refusing]:
    streams = {name: Refusing(world.stores[name]) for name in ("east", "west")}
    for name, error in errors.items():
        streams[name].error = error
    return streams


def refused(reader: Reader) -> bool:
    return reader.health()["west"].state is RegionState.REFUSING


@pytest.mark.parametrize("error", [REFUSED, WRONG_TYPE])
def test_the_others_go_on_and_it_is_read_again_when_it_is_mended(world: Regions, error: AnabranchError) -> None:
    streams = streams_of(world, west=error)
    put(streams["east"], entry(0))
    put(streams["west"], entry(1))
    with capture_logs() as logs:
        reader = world.reader(streams=streams)
        assert indices(drain(reader)) == [0]
        wait(lambda: refused(reader), "the refusal")
        for _ in range(3):
            asked = streams["west"].asked
            world.now_s += 60
            wait(lambda: streams["west"].asked > asked, "another try")  # noqa: B023
        put(streams["east"], entry(2))
        assert indices(until(reader, lambda polled: polled.arrivals)) == [2]
        health = reader.health()["west"]
        assert (health.state, health.why) == (RegionState.REFUSING, str(error))
        assert reader.refusing() == reader.unreachable() == {"west": str(error)}
        streams["west"].error = None
        world.now_s += 60
        assert indices(until(reader, lambda polled: polled.arrivals)) == [1]
        wait(lambda: reader.health()["west"].state is RegionState.READING, "the region to be read")
        assert reader.refusing() == {}
        world.die()
    (alarm,) = [log for log in logs if log["log_level"] == "error"]
    assert (alarm["region"], alarm["error"]) == ("west", str(error)), "told once"


def test_it_is_asked_ever_more_rarely_but_asked(world: Regions) -> None:
    """Each refusal is a line in its server's log."""
    asked: list[float] = []

    class Watched(Refusing):
        def _check(self) -> None:
            asked.append(world.now_s)
            super()._check()

    west = Watched(world.stores["west"])
    west.error = REFUSED
    reader = world.reader(streams={"east": world.stream("east"), "west": west})
    drain(reader)
    wait(lambda: refused(reader), "the refusal")
    for _ in range(200):
        before = len(asked)
        world.now_s += 5
        if world.now_s - asked[-1] >= REFUSED_LAST_S:
            wait(lambda: len(asked) > before, "another try")  # noqa: B023
    pauses = [b - a for a, b in itertools.pairwise(asked)]
    assert len(asked) > 20
    assert max(pauses) <= REFUSED_LAST_S + 5
    assert min(pauses[-10:]) >= REFUSED_LAST_S


@pytest.mark.parametrize("both", [(REFUSED, REFUSED), (WRONG_TYPE, WRONG_TYPE), (REFUSED, WRONG_TYPE)])
def test_when_every_region_refuses_the_reader_ends_and_names_each(
    world: Regions, both: tuple[AnabranchError, AnabranchError]
) -> None:
    reader = world.reader(streams=streams_of(world, east=both[0], west=both[1]))
    with pytest.raises(AnabranchError) as caught:
        until(reader, lambda polled: False)
    assert type(caught.value) is (type(both[0]) if type(both[0]) is type(both[1]) else AnabranchError)
    assert all(str(error) in str(caught.value) for error in both)
    with pytest.raises(AnabranchError):
        reader.poll(block_ms=1)


def test_a_region_that_is_away_may_come_back_so_the_reader_goes_on(world: Regions) -> None:
    streams = streams_of(world, east=AWAY, west=REFUSED)
    reader = world.reader(streams=streams)
    wait(lambda: reader.poll(block_ms=1) is not None and len(reader.unreachable()) == 2, "both to be seen")
    assert reader.refusing() == {"west": str(REFUSED)}
    put(streams["east"], entry(0))
    streams["east"].error = None
    world.now_s += 60
    assert indices(until(reader, lambda polled: polled.arrivals)) == [0]


def test_while_its_ledger_cannot_be_read_it_is_not_read_either(world: Regions) -> None:
    """Nothing of it could be settled; and a state that comes and goes would be told again each time."""
    counts = 0

    class NoLedger(MemoryStream):
        def ledger(self, group: str) -> LedgerCounts:
            nonlocal counts
            counts += 1
            raise WRONG_TYPE

    stream = NoLedger(world.stores["west"])
    put(stream, entry(0))
    reader = world.reader(streams={"east": world.stream("east"), "west": stream}, ledger_every_s=1000)
    drain(reader)
    wait(lambda: refused(reader), "the refusal")
    for _ in range(5):
        before = counts
        world.now_s += 60
        wait(lambda: counts > before, "another try")  # noqa: B023
        assert refused(reader)
    assert reader.poll(block_ms=1).arrivals == []


def test_what_cannot_be_acknowledged_waits_and_holds_nobody_up(world: Regions) -> None:
    class NoSettling(MemoryStream):
        refuses = True

        def settle(self, group: str, fates: Sequence[tuple[str, str]]) -> int:
            if self.refuses:
                raise WRONG_TYPE
            return super().settle(group, fates)

    stream = NoSettling(world.stores["west"])
    put(stream, entry(0))
    reader = world.reader(streams={"east": world.stream("east"), "west": stream})
    (arrival,) = drain(reader).arrivals
    reader.settle("west", [(arrival.entry_id, "trained")])
    wait(lambda: refused(reader), "the refusal")
    assert reader.flush(deadline_s=20), "nobody waits for it"
    assert reader.unsettled() == {("west", arrival.entry_id)}
    stream.refuses = False
    world.now_s += 60
    wait(lambda: not reader.unsettled(), "the acknowledgement")
    assert stream.ledger(LEARNER_GROUP).fates == {"trained": 1}
