"""Retention beside publishing: what fails is done again, what is dropped is told, and it is not looked at every version."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from anabranch.learner import housekeeper
from anabranch.learner.housekeeper import Housekeeper
from anabranch.schemas.errors import StreamUnavailableError
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.memory_weight_channel import MemoryWeightChannel
from anabranch.transport.memory_world import MemoryWorld
from anabranch.transport.weight_retention import held_bytes
from tests.publisher_lab import Lab
from tests.publishers import hub_of


class Channel(MemoryWeightChannel):
    """Counts looks at the index; the first `failures` of them fail."""

    def __init__(self, world: MemoryWorld, failures: int = 0, error: type[Exception] = StreamUnavailableError) -> None:
        super().__init__(world.weights)
        self.failures, self.error, self.looks = failures, error, 0
        self.fell = threading.Event()

    def index(self, *, above: object = None) -> list[IndexEntry]:
        self.looks += 1
        if self.looks <= self.failures:
            raise self.error("not now")
        return super().index()

    def drop(self, entries: object) -> list[IndexEntry]:
        gone = super().drop(entries)  # type: ignore[arg-type]
        self.fell.set()
        return gone


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A channel of 60 versions, nothing dropped."""
    monkeypatch.setattr(housekeeper, "AGAIN_AFTER_S", 0.02)
    lab = Lab()
    with lab.ranks(skip_levels=2) as ranks:
        ranks.open()
        for _ in range(60):
            lab.step(0.1)
            ranks.publish()
        ranks.drain()
    return lab


@contextmanager
def keeping(
    channel: Channel, world: MemoryWorld, budget: int, told: Callable[..., object] = lambda gone: None
) -> Iterator[Housekeeper]:
    keeper = Housekeeper(lambda: hub_of(world, channel), budget, on_dropped=told)
    try:
        yield keeper
    finally:
        keeper.close(deadline_s=10)


@pytest.mark.parametrize("error", [StreamUnavailableError, ZeroDivisionError])
def test_what_fails_is_done_again(lab: Lab, error: type[Exception]) -> None:
    channel = Channel(lab.world, failures=2, error=error)
    with keeping(channel, lab.world, 0):
        assert channel.fell.wait(20), "it gave up after a failure"


def test_it_says_what_has_gone(lab: Lab) -> None:
    channel, gone = Channel(lab.world), []
    before = set(channel.index())
    with keeping(channel, lab.world, 0, gone.extend):
        assert channel.fell.wait(20)
    assert set(gone) == before - set(channel.index()) != set()


def test_a_channel_at_its_budget_is_not_looked_at_for_every_version() -> None:
    lab = Lab()
    world, channel = lab.world, Channel(lab.world)
    budget = 500_000
    with lab.ranks(retain_bytes=budget, skip_levels=0, connect=lambda: hub_of(world, channel)) as ranks:
        ranks.open()
        sizes = []
        for _ in range(60):
            lab.step(0.1)
            ranks.publish()
            ranks.drain()
            sizes.append(held_bytes(lab.world.channel().index()))
    assert max(sizes) <= budget
    assert 2 < channel.looks < 30, "of about 35 versions above the budget"
