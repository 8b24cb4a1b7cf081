"""All regions at once; one that is away is shown as such, with what the learner counted there last."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from anabranch.deploy.ledger_look import look
from anabranch.schemas.config import RunConfig, load_config
from anabranch.schemas.errors import StreamUnavailableError
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.schemas.metrics import LearnerStatus, RegionCounts
from anabranch.transport.memory_world import MemoryWorld
from anabranch.transport.stream import LedgerCounts
from tests.groups import entry
from tests.streams import put

LAST = RegionCounts(produced=7, pending=7, at_ms=1)


class Sites:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.away = MemoryWorld("run", ["east", "west"]), set[str]()
        monkeypatch.setattr("anabranch.transport.wiring.connect_region", self._region)
        monkeypatch.setattr("anabranch.transport.wiring.connect_hub", self._hub)
        urls = [f"regions.{name}.url=redis://h:1" for name in ("east", "west")]
        self.config: RunConfig = load_config("", overrides=urls)

    def _region(self, config: RunConfig, name: str):
        self._check(name)
        return self.world.stream(name)

    def _hub(self, config: RunConfig):
        self._check("hub")
        return SimpleNamespace(runs=self.world.runs, close=lambda: None)

    def _check(self, name: str) -> None:
        if name in self.away:
            raise StreamUnavailableError(f"no answer from {name}")


@pytest.fixture
def sites(monkeypatch: pytest.MonkeyPatch) -> Sites:
    return Sites(monkeypatch)


def test_every_region_is_read_with_its_readers(sites: Sites) -> None:
    stream = sites.world.stream("east")
    put(stream, entry(0), entry(1))
    stream.read(LEARNER_GROUP, "c", max_entries=1, block_ms=0)
    ledgers = look(sites.config)
    assert list(ledgers.asked.answers) == ["east", "west"]
    east = ledgers.asked.answers["east"]
    assert east.counts == LedgerCounts(2, 2)
    assert [(g.name, g.undelivered, g.pending) for g in east.groups] == [("learner", 1, 1)]
    assert (ledgers.unbalanced, ledgers.last) == ([], {})


def test_a_region_that_is_away_comes_with_what_the_learner_counted_last(sites: Sites) -> None:
    sites.away.add("west")
    status = LearnerStatus(
        updated_ms=1, state="stepping", step=1, steps_total=2, epoch=1, version=1, ledger={"east": LAST, "west": LAST},
        alarms=("something is wrong",),
    )  # fmt: skip
    sites.world.runs.report_learner(status)
    ledgers = look(sites.config)
    assert list(ledgers.asked.answers) == ["east"]
    assert str(ledgers.asked.away["west"]) == "no answer from west"
    assert (ledgers.last, ledgers.alarms) == ({"west": LAST}, ("something is wrong",))


@pytest.mark.parametrize("hub", ["away", "knows nothing"])
def test_a_hub_that_cannot_say_changes_nothing(sites: Sites, hub: str) -> None:
    sites.away |= {"west", "hub"} if hub == "away" else {"west"}
    ledgers = look(sites.config)
    assert (list(ledgers.asked.answers), list(ledgers.asked.away), ledgers.last) == (["east"], ["west"], {})


def test_one_that_does_not_balance_is_named(sites: Sites) -> None:
    sites.world.stores["west"].books.produced += 1
    assert look(sites.config).unbalanced == ["west"]
