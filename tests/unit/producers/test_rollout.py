"""The producer's loop over an engine that fails on purpose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from anabranch.producers.engine import EngineState
from anabranch.producers.rollout import ProducerState, RolloutLoop
from anabranch.producers.weight_follower import Staged
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import AnabranchError, DeltaError
from anabranch.schemas.versions import PolicyVersion

STAGED = Staged(PolicyVersion(1, 3), "0" * 32, {}, 0, (), 0)


class Follower:
    """Has one update on offer and notes what becomes of it."""

    def __init__(self) -> None:
        self.rejected: list[str] = []
        self.mirror = None
        self.last_error = ""

    def staged(self, *, wait_s: float = 0.0) -> Staged | None:
        return None if self.rejected else STAGED

    def reject(self, staged: Staged, reason: str) -> None:
        self.rejected.append(reason)


class Outbox:
    error = ""

    def __len__(self) -> int:
        return 0

    def flush(self) -> list[int]:
        return []


def loop_over(error: AnabranchError, state_after: EngineState) -> tuple[RolloutLoop, Follower]:
    """A loop whose engine answers a swap with `error`, and is in `state_after` then."""
    engine = SimpleNamespace(state=EngineState.SERVING, policy=PolicyVersion(1, 2), has_unfinished=False)

    def swap(*_: object) -> None:
        engine.state = state_after
        raise error

    engine.swap = swap
    follower = Follower()
    link: Any = SimpleNamespace(
        want=lambda *_: None,
        take=lambda _: [],
        take_evaluation=lambda: None,
        evaluation_waits=False,
        error="",
        lost=lambda: set(),
    )
    loop = RolloutLoop(
        cast(Any, engine),
        cast(Any, None),
        cast(Any, follower),
        link,
        cast(Any, Outbox()),
        RunConfig(),
        producer="p",
        region="local",
    )
    return loop, follower


def test_a_refused_swap_leaves_the_old_version_serving() -> None:
    loop, follower = loop_over(DeltaError("an index is out of range"), EngineState.SERVING)
    loop.turn()
    assert follower.rejected == ["an index is out of range"]


def test_an_engine_that_broke_in_a_swap_ends_the_producer() -> None:
    """It could not sample again, but would keep its permits and look alive."""
    loop, follower = loop_over(AnabranchError("failed while writing"), EngineState.BROKEN)
    with pytest.raises(AnabranchError, match="failed while writing"):
        loop.turn()
    assert not follower.rejected


def test_its_state_says_whether_it_samples_or_idles() -> None:
    loop, _ = loop_over(DeltaError("refused"), EngineState.SERVING)
    loop.turn()
    assert (loop.state, loop.status().waiting_for) == (ProducerState.IDLE, "permits")
    loop._engine.has_unfinished = True  # type: ignore[misc]
    loop._engine.step = lambda: []  # type: ignore[method-assign]
    loop.turn()
    assert (loop.state, loop.status().waiting_for) == (ProducerState.SAMPLING, "")
