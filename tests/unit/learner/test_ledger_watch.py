"""The learner tells of a ledger that does not hold, once, and until it does again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.consumers.fate_log import FateLog
from anabranch.learner.ledger_watch import LedgerWatch
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
