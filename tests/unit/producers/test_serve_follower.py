"""The loop of `anabranch follow`, over a server and a follower that do as they are told."""

from __future__ import annotations

from typing import Any, cast

import pytest

from anabranch.producers.serve_follower import TORN_TRIES, FollowOptions, ServerLoop
from anabranch.producers.server_swap import SwapState
from anabranch.producers.weight_follower import Staged
from anabranch.schemas.errors import AnabranchError, DeadlineError, DeltaError, ModelMismatchError, TemporaryError
from anabranch.schemas.versions import PolicyVersion


def staged(version: int) -> Staged:
    return Staged(PolicyVersion(1, version), f"{version:032x}", {}, 7, (), 0, version)


class Follower:
    mirror = None

    def __init__(self, offers: list[Staged]) -> None:
        self.offers, self.confirmed, self.rejected, self.closed = offers, [], [], False
        self.free = True

    def start(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    def staged(self, *, wait_s: float = 0.0) -> Staged | None:
        return self.offers[0] if self.offers else None

    def hold(self) -> Staged | None:
        return self.staged() if self.free else None

    def confirm(self, update: Staged) -> None:
        self.confirmed.append(self.offers.pop(0))

    def reject(self, update: Staged, reason: str) -> None:
        self.rejected.append(reason)


class Swap:
    def __init__(self) -> None:
        self.state, self.policy = SwapState.DETACHED, None
        self.error: AnabranchError | None = None
        self.torn_by: AnabranchError | None = None
        self.away: AnabranchError | None = None
        self.verified: list[str | None] = []

    def check_server(self) -> None:
        if self.away is not None:
            raise self.away

    def attach(self) -> None:
        self.state = SwapState.ATTACHED

    def swap(self, mirror: object, policy: PolicyVersion, changed: object, *, verify: str | None) -> float:
        if self.torn_by is not None:
            self.state = SwapState.TORN
            raise self.torn_by
        if self.error is not None:
            raise self.error
        self.verified.append(verify)
        self.state, self.policy = SwapState.SERVING, policy
        return 0.002


def build(*offers: Staged, **options: Any) -> tuple[ServerLoop, Swap, list[Follower]]:
    swap, made = Swap(), []

    def make() -> Follower:
        made.append(Follower(list(offers)))
        return made[-1]

    settings = FollowOptions("http://server", **options)
    loop = ServerLoop(cast(Any, swap), cast(Any, make), settings, sleep=lambda _: None)
    return loop, swap, made


def test_what_the_server_confirmed_is_confirmed() -> None:
    loop, swap, made = build(staged(1), staged(2), staged(3), verify_every=2)
    for _ in range(4):
        loop.turn()
    assert [s.policy.version for s in made[0].confirmed] == [1, 2, 3]
    assert swap.verified == [None, staged(2).digest, None]
    assert loop.verified == ("e1.v2", staged(2).digest)
    assert (loop.swaps, loop.pause_ms, len(made)) == (3, 2.0, 1)


def test_a_restarted_server_gets_a_follower_that_has_confirmed_nothing() -> None:
    loop, swap, made = build(staged(1))
    loop.turn()
    swap.state = SwapState.DETACHED
    loop.turn()
    assert made[0].closed
    assert [s.policy.version for s in made[1].confirmed] == [1]


def test_a_refusal_is_told_and_tried_again() -> None:
    loop, swap, made = build(staged(1))
    swap.error = DeltaError("an index")
    loop.turn()
    assert made[0].rejected == ["an index"]
    assert loop.error == "swap to e1.v1 refused: an index"
    swap.error = None
    loop.turn()
    assert (loop.error, loop.swaps) == ("", 1)


def test_a_model_that_does_not_fit_ends_the_process() -> None:
    loop, swap, made = build(staged(1))
    swap.error = ModelMismatchError("another layout")
    with pytest.raises(ModelMismatchError):
        loop.turn()
    assert made[0].rejected, "the mirror is let go"


def test_a_server_that_stays_torn_ends_the_process() -> None:
    loop, swap, made = build(staged(1))
    swap.torn_by = TemporaryError("gone")
    for _ in range(TORN_TRIES - 1):
        loop.turn()
    assert "the server is paused" in loop.error
    with pytest.raises(TemporaryError, match=f"stays paused after {TORN_TRIES} swaps"):
        loop.turn()
    assert len(made[0].rejected) == TORN_TRIES


def test_a_server_that_is_away_is_waited_for_but_not_for_ever() -> None:
    loop, swap, made = build(staged(1), server_deadline_s=1e9)
    swap.away = TemporaryError("refused")
    loop.turn()
    assert (loop.error, made) == ("refused", [])
    swap.away = None
    loop.turn()
    assert loop.swaps == 1
    loop, swap, _ = build(server_deadline_s=0.0)
    swap.away = TemporaryError("refused")
    with pytest.raises(DeadlineError, match="http://server"):
        [loop.turn() for _ in range(100)]


def test_while_the_mirror_is_written_nothing_is_swapped() -> None:
    loop, _, made = build(staged(1))
    loop.turn()
    made[0].offers.append(staged(2))
    made[0].free = False
    loop.turn()
    assert loop.swaps == 1
