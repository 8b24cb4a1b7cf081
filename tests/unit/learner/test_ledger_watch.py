"""The learner tells of a ledger that does not hold, and of a region that refuses it, once, and until that is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from anabranch.consumers.fate_log import FateLog
from anabranch.learner.ledger_watch import LedgerWatch
from anabranch.schemas.errors import ConfigError
from anabranch.transport.memory_stream import MemoryStream
from anabranch.transport.stream import Delivery
from tests.groups import entry
from tests.readers import Regions, drain, wait
from tests.streams import put


@pytest.fixture
def world() -> Iterator[Regions]:
    with Regions("east") as made:
        yield made


def test_an_alarm_is_noted_when_it_begins_and_when_it_is_over(world: Regions, tmp_path: Path) -> None:
    log = FateLog(tmp_path, file_lines=100)
    reader = world.reader(ledger_every_s=1)
    watch = LedgerWatch(reader, log)
    put(world.stream("east"), entry(0))
    drain(reader)
    assert (watch.look(), watch.alarms(), watch.pending()) == ([], (), {"east": 1})

    def after_the_next_count() -> list:
        at_s = reader.counted()["east"].at_s
        world.now_s += 2
        wait(lambda: reader.counted()["east"].at_s > at_s, "the next count")
        return watch.look()

    world.stores["east"].books.produced += 1
    ((what, detail),) = after_the_next_count()
    assert (what, detail["region"], detail["kind"]) == ("ledger_alarm", "east", "balance")
    assert after_the_next_count() == []
    assert len(watch.alarms()) == 1
    assert watch.ledger()["east"].produced == 2
    assert watch.regions()["east"].startswith("reading for")
    world.stores["east"].books.produced -= 1
    assert after_the_next_count() == [("ledger_holds", {"region": "east", "kind": "balance"})]
    assert watch.alarms() == ()
    log.close()


def test_entries_that_are_not_ours_are_told_at_every_change_and_stand_in_the_status(
    world: Regions, tmp_path: Path
) -> None:
    reader = world.reader(ledger_every_s=1)
    watch = LedgerWatch(reader, FateLog(tmp_path, file_lines=100))
    put(world.stream("east"), entry(0))
    drain(reader)
    assert (watch.look(), watch.notes()) == ([], ())

    def after_the_next_count() -> list:
        at_s = reader.counted()["east"].at_s
        world.now_s += 2
        wait(lambda: reader.counted()["east"].at_s > at_s, "the next count")
        return watch.look()

    store = world.stores["east"]
    with capture_logs() as logs:
        store.add(next(iter(store.entries.values())))
        assert after_the_next_count() == [("foreign_entries", {"region": "east", "foreign": 1, "new": 1})]
        assert after_the_next_count() == []
        assert watch.notes() == ("region east: 1 entries that no producer appended",)
        assert watch.alarms() == (), "the ledger holds"
        store.add({b"nonsense": b"1"})
        store.add({b"nonsense": b"1"})
        assert after_the_next_count() == [("foreign_entries", {"region": "east", "foreign": 3, "new": 2})]
        assert watch.notes() == ("region east: 3 entries that no producer appended",)
    assert [(log["foreign"], log["new"]) for log in logs if log["log_level"] == "warning" and "foreign" in log] == [
        (1, 1), (3, 2),
    ]  # fmt: skip


def test_a_region_that_refuses_is_an_alarm_until_it_is_mended(world: Regions, tmp_path: Path) -> None:
    class West(MemoryStream):
        refuses = True

        def read_own_pending(
            self, group: str, consumer: str, *, max_entries: int, after_id: str = "0-0"
        ) -> list[Delivery]:
            if self.refuses:
                raise ConfigError("the Redis of region west refused the credentials")
            return []

    west = West(world.stores["east"])
    reader = world.reader(streams={"east": world.stream("east"), "west": west})
    watch = LedgerWatch(reader, FateLog(tmp_path, file_lines=100))
    drain(reader)
    text = "region west refuses the learner: the Redis of region west refused the credentials"
    assert watch.look() == [("region_alarm", {"region": "west", "alarm": text})]
    assert watch.look() == []
    assert watch.alarms() == (text,)
    assert watch.regions()["west"].startswith("refusing for")
    west.refuses = False
    world.now_s += 60
    wait(lambda: not reader.refusing(), "the region to be read")
    assert watch.look() == [("region_answers", {"region": "west"})]
    assert watch.alarms() == ()
