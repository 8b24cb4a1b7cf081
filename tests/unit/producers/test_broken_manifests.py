"""Broken manifests: pauses that grow, within a minute where a chunk may be mended, and nothing remembered for ever."""

from __future__ import annotations

import pytest

from anabranch.producers import turn_failures
from anabranch.producers.broken_manifests import MENDABLE_LAST_S, UNFIT_LAST_S, BrokenManifests
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.weight_channel import Named

ANCHOR: Named = (PolicyVersion(1, 0), "anchor")
WHY = {ANCHOR: DeltaError("altered")}


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def pause_s(broken: BrokenManifests, clock: Clock) -> float:
    """Moves the clock to when ANCHOR may be tried again."""
    begin_s = clock.now_s
    while ANCHOR in broken.now():
        clock.now_s += 0.05
    return clock.now_s - begin_s


@pytest.mark.parametrize("unfit", [False, True])
def test_pauses_grow_up_to_their_bound(unfit: bool) -> None:
    clock = Clock()
    broken = BrokenManifests(clock)
    assert broken.now() == {}
    pauses = []
    for _ in range(16):
        broken.add(WHY, unfit=unfit)
        assert broken.now() == WHY
        pauses.append(pause_s(broken, clock))
    assert pauses[0] < 0.3
    assert pauses[:4] == sorted(pauses[:4])
    bound_s = UNFIT_LAST_S if unfit else MENDABLE_LAST_S
    assert bound_s / 2 - 0.1 <= pauses[-1] <= bound_s + 0.1


def test_a_mended_chunk_is_found_within_a_minute() -> None:
    assert MENDABLE_LAST_S + turn_failures.RETRY_LAST_S + turn_failures.TAKEOVER_S < 60


def test_what_was_not_met_for_long_is_forgotten_and_success_forgets_at_once() -> None:
    clock = Clock()
    broken = BrokenManifests(clock)
    broken.add(WHY)
    clock.now_s += 60
    assert broken.now() == {}
    assert broken.knows_all([ANCHOR]), "it may be tried, and goes on counting"
    clock.now_s += UNFIT_LAST_S
    broken.now()
    assert not broken.knows_all([ANCHOR])
    broken.add(WHY)
    broken.clear()
    assert broken.now() == {}
