"""What the other ranks do when publishing has failed on one of them (the rest: tests/e2e/test_learner_engine.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from anabranch.learner import collective
from anabranch.learner.collective import CollectiveEngine, Op, follow
from anabranch.learner.publish_order import EpochOpening, PublishOrder
from anabranch.schemas.errors import ConfigError

OPENING = EpochOpening("r", 1, 0, 0).to_bytes()


class Publisher:
    """Fails after it was handed `good` versions."""

    def __init__(self, good: int) -> None:
        self.left, self.closed = good, False
        self.published: list[int] = []

    def open(self) -> None: ...

    def next_order(self, version: int) -> PublishOrder:
        return PublishOrder(version, version)

    def publish(self, order: PublishOrder) -> float:
        self.check()
        self.left -= 1
        self.published.append(order.version)
        return 0.0

    def check(self) -> None:
        if not self.left:
            raise ConfigError("the store refuses")

    def close(self) -> None:
        self.closed = True


def told(monkeypatch: pytest.MonkeyPatch, *messages: bytes) -> None:
    rest: Iterator[bytes] = iter(messages)
    monkeypatch.setattr(collective, "broadcast_bytes", lambda data: next(rest))


def test_a_rank_whose_publishing_failed_ends_with_that_when_rank_0_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 stops because of it; exit code 0 and not a word would hide what happened."""
    publisher = Publisher(1)
    order = PublishOrder(1, 1).to_bytes()
    told(monkeypatch, bytes([Op.OPEN_EPOCH]) + OPENING, bytes([Op.PUBLISH]) + order, bytes([Op.STOP]))
    with pytest.raises(ConfigError, match="the store refuses"):
        follow(cast(Any, None), lambda engine, opening: cast(Any, publisher))
    assert publisher.closed


def test_a_rank_that_is_well_ends_when_rank_0_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = Publisher(2)
    told(monkeypatch, bytes([Op.OPEN_EPOCH]) + OPENING, bytes([Op.PUBLISH]) + PublishOrder(1, 1).to_bytes(), b"\x07")
    follow(cast(Any, None), lambda engine, opening: cast(Any, publisher))
    assert (publisher.published, publisher.closed) == ([1], True)


def test_a_version_that_rank_0_cannot_publish_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks would wait for rank 0 in the copying of it."""
    said: list[bytes | None] = []
    monkeypatch.setattr(collective, "broadcast_bytes", said.append)
    engine = CollectiveEngine(cast(Any, None), world_size=2)
    with pytest.raises(ConfigError, match="the store refuses"):
        engine.publish(cast(Any, Publisher(0)), 1)
    assert said == []
