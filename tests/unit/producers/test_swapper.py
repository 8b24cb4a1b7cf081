"""How an offered update gets into an engine, over an engine and a follower that do as they are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from anabranch.producers.engine import EngineState, SwapReport
from anabranch.producers.swapper import Swapper
from anabranch.producers.weight_follower import Staged
from anabranch.schemas.config import ProducerSection
from anabranch.schemas.errors import AnabranchError, DeltaError, ModelMismatchError
from anabranch.schemas.layout import Layout
from anabranch.schemas.versions import PolicyVersion

STAGED = Staged(PolicyVersion(1, 3), "0" * 32, {}, 7, ("delta e1.v3",), 0, 1)


class Follower:
    """Has one update on offer until it is confirmed or rejected; `free` says whether it can be held."""

    def __init__(self) -> None:
        self.offer: Staged | None = STAGED
        self.serving: Staged | None = None
        self.rejected: list[str] = []
        self.free, self.holds = True, 0
        self.mirror = SimpleNamespace(layout=Layout.build([]))

    def staged(self, *, wait_s: float = 0.0) -> Staged | None:
        return self.offer

    def hold(self) -> Staged | None:
        self.holds += 1
        return self.offer if self.free else None

    def confirm(self, staged: Staged) -> None:
        self.serving, self.offer = staged, None

    def reject(self, staged: Staged, reason: str) -> None:
        self.rejected.append(reason)
        self.offer = None


class Engine:
    def __init__(self) -> None:
        self.state, self.has_unfinished = EngineState.SERVING, False
        self.ready_after = self.prepared = self.swapped = 0
        self.error: AnabranchError | None = None
        self.digest = STAGED.digest

    def prepare(self, *_: object) -> bool:
        self.prepared += 1
        return self.prepared > self.ready_after

    def swap(self, mirror: object, policy: PolicyVersion, changed: object) -> SwapReport:
        if self.error is not None:
            raise self.error
        self.swapped += 1
        return SwapReport(policy, 0.001, 0, 0)

    def live_digest(self) -> str:
        return self.digest


def build(**config: Any) -> tuple[Swapper, Engine, Follower]:
    engine, follower = Engine(), Follower()
    return Swapper(cast(Any, engine), cast(Any, follower), ProducerSection(**config)), engine, follower


def test_an_update_is_confirmed_after_the_swap_and_leaves_its_figures() -> None:
    swapper, engine, follower = build()
    swapper.turn()
    assert (engine.swapped, follower.serving, swapper.swaps) == (1, STAGED, 1)
    assert swapper.served_since_ms > 0
    assert swapper.pause_ms == 1.0
    swapper.turn()
    assert engine.swapped == 1


def test_while_requests_run_an_update_is_worked_out_beside_them() -> None:
    swapper, engine, follower = build()
    engine.has_unfinished, engine.ready_after = True, 2
    for turn in (1, 2):
        swapper.turn()
        assert (engine.prepared, engine.swapped, follower.holds, swapper.busy) == (turn, 0, 1, True)
    swapper.turn()
    assert (engine.swapped, follower.serving, swapper.busy) == (1, STAGED, False)


def test_an_engine_that_never_gets_ready_does_not_keep_the_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.producers.swapper.HOLD_DEADLINE_S", -1.0)
    swapper, engine, follower = build()
    engine.has_unfinished, engine.ready_after = True, 99
    swapper.turn()
    assert "work out the update to e1.v3" in follower.rejected[0]
    assert not swapper.busy


def test_while_the_mirror_is_written_the_old_version_goes_on() -> None:
    swapper, engine, follower = build()
    follower.free = False
    swapper.turn()
    assert (engine.swapped, swapper.blocked, swapper.error) == (0, True, "")
    follower.free = True
    swapper.turn()
    assert (engine.swapped, swapper.blocked) == (1, False)


def test_new_requests_only_waits_until_nothing_runs_and_holds_nothing_meanwhile() -> None:
    swapper, engine, follower = build(kv_policy="new_requests_only")
    engine.has_unfinished = True
    swapper.turn()
    assert (swapper.settling, follower.holds, engine.prepared, engine.swapped) == (True, 0, 0, 0)
    engine.has_unfinished = False
    swapper.turn()
    assert (swapper.settling, engine.swapped) == (False, 1)


def test_with_kv_kept_nothing_settles() -> None:
    swapper, engine, _ = build()
    engine.has_unfinished = True
    assert not swapper.settling


def test_a_swap_that_is_refused_again_and_again_is_logged_once() -> None:
    swapper, engine, _ = build()
    engine.error = DeltaError("an index is out of range")
    with capture_logs() as logs:
        for _ in range(3):
            swapper.turn()
    assert len(logs) == 1
    assert engine.prepared + engine.swapped == 0


def test_a_refused_swap_leaves_the_old_version_serving_and_says_why() -> None:
    swapper, engine, follower = build()
    engine.error = DeltaError("an index is out of range")
    swapper.turn()
    assert follower.rejected == ["an index is out of range"]
    assert swapper.error == "swap to e1.v3 refused: an index is out of range"
    assert follower.serving is None


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (AnabranchError("failed while writing"), EngineState.BROKEN),
        (ModelMismatchError("another model"), EngineState.SERVING),
    ],
    ids=["broken", "configuration"],
)
def test_what_cannot_go_on_ends_the_producer(error: AnabranchError, state: EngineState) -> None:
    """A broken engine could not sample again, but would keep its permits and look alive."""
    swapper, engine, follower = build()
    engine.error, engine.state = error, state
    with pytest.raises(type(error), match=str(error)):
        swapper.turn()
    assert not follower.rejected


def test_the_live_engine_is_verified_every_so_often_and_when_asked() -> None:
    swapper, _, follower = build(verify_every_updates=2)
    swapper.turn()
    assert swapper.verified == ("", "", "")
    follower.offer = STAGED
    swapper.turn()
    assert swapper.verified == ("", "e1.v3", STAGED.digest)
    assert swapper.verify_now("token") == STAGED.digest
    assert swapper.verified == ("token", "e1.v3", STAGED.digest)


def test_an_engine_that_is_not_what_it_claims_ends_the_producer_and_is_reported() -> None:
    swapper, engine, _ = build()
    swapper.turn()
    engine.digest = "f" * 32
    with pytest.raises(DeltaError, match="live engine's weights have digest ffff"):
        swapper.verify_now("token")
    assert swapper.verified == ("token", "e1.v3", "f" * 32)


def test_a_digest_that_cannot_be_computed_is_an_answer_too() -> None:
    swapper, engine, _ = build()
    swapper.answer("early")
    assert swapper.verified == ("", "", ""), "nothing is served yet"
    swapper.turn()

    def no_way_back() -> str:
        raise ModelMismatchError("the loader computes it")

    engine.live_digest = no_way_back  # type: ignore[method-assign]
    swapper.answer("token")
    assert (swapper.verified, swapper.verify_error) == (("token", "e1.v3", ""), "the loader computes it")
