"""A wait that names its cause: who is silent, who holds the permits."""

from __future__ import annotations

import pytest

from anabranch.learner.no_progress import ASK_EVERY_S, NoProgress
from anabranch.schemas.errors import StreamUnavailableError
from anabranch.schemas.metrics import ProducerStatus
from anabranch.transport.memory_world import MemoryWorld


class Hub:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.world = MemoryWorld(clock_ms=lambda: self.now_s * 1000)
        self.why = NoProgress(self.world.runs, self.world.permits, clock=lambda: self.now_s)

    def open(self) -> None:
        self.world.permits.reset(epoch=1, version=0, batch=4, max_age=0, total=100, accepted=())

    def report(self, name: str, region: str, **fields: str) -> None:
        made = {"updated_ms": 0, "region": region, "pid": 1, "state": "sampling", "policy": ""} | fields
        self.world.runs.report_producer(name, ProducerStatus.model_validate(made))

    def after(self, seconds: float) -> str:
        self.now_s += seconds
        return self.why()


@pytest.fixture
def hub() -> Hub:
    return Hub()


def test_nobody_was_ever_there(hub: Hub) -> None:
    hub.open()
    said = hub.after(300)
    assert (
        said
        == "no producer has reported since this learner began to wait, 300 s ago; 4 permits wait for somebody to take them"
    )


def test_all_have_fallen_silent(hub: Hub) -> None:
    hub.open()
    hub.report("eu-0", "eu")
    hub.world.permits.take("eu-0", max_groups=4, lease_ms=10_000_000)
    hub.why()
    said = hub.after(300)
    assert "no producer has reported for 300 s" in said
    assert "all 4 permits are leased: 4 by eu-0, of region eu, silent for 300 s" in said


def test_those_who_report_say_what_they_wait_for(hub: Hub) -> None:
    hub.open()
    hub.report("eu-0", "eu", waiting_for="room in the spool")
    hub.report("us-0", "us")
    hub.world.permits.take("us-0", max_groups=1, lease_ms=10_000_000)
    said = hub.after(1)
    assert "2 producers report: eu-0 waits for room in the spool, us-0 sampling" in said
    assert "1 permits are leased: 1 by us-0; 3 wait to be taken" in said


def test_permits_that_nobody_opened(hub: Hub) -> None:
    assert "permits are not open" in hub.after(1)


def test_the_hub_is_asked_seldom_and_may_be_away(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def away() -> dict:
        asked.append(hub.now_s)
        raise StreamUnavailableError("lost the hub")

    monkeypatch.setattr(hub.world.runs, "producers", away)
    assert [hub.after(1.0) for _ in range(11)] == ["the hub does not say why (lost the hub)"] * 11
    assert len(asked) == 3
    assert asked[1] - asked[0] >= ASK_EVERY_S
