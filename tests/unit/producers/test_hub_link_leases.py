"""What becomes of a lease that a producer does not finish with an entry in its stream: none is kept for ever."""

from __future__ import annotations

import pytest

from anabranch.producers.hub_link import EVALUATION_LEASE_MS, RETRY_LAST_S, HubLink
from anabranch.schemas.errors import BackpressureError, StreamUnavailableError
from anabranch.transport.memory_permits import MemoryPermits
from anabranch.transport.permits import Permit
from tests.unit.producers.hub_lab import LEASE_MS, V0, V1, Lab, granted, taken

LEASE_S = LEASE_MS / 1000


def attempts(lab: Lab, producer: str = "other", most: int = 100) -> list[tuple[int, int]]:
    return [(p.group_index, p.attempt) for p in lab.permits.take(producer, max_groups=most, lease_ms=LEASE_MS)]


def refuse(error: Exception):
    def call(*args: object, **kwargs: object) -> object:
        raise error

    return call


def test_a_group_given_up_is_somebody_elses_with_the_next_turn() -> None:
    lab = Lab(total=4)
    link = lab.link()
    assert granted(lab, link, 3) == [0, 1, 2]
    link.want(0, V0)
    link.give_up(1)
    link.hand_back(2)
    assert attempts(lab) == [(3, 0)], "the hub has not heard"
    link.turn()
    assert attempts(lab) == [(1, 1), (2, 1)]
    link.turn()
    assert link.lost() == set(), "they went away with our knowledge"


def test_only_what_is_given_up_is_abandoned_in_the_end() -> None:
    lab = Lab(total=2)
    link = lab.link()
    for round_ in range(4):
        assert granted(lab, link, 2) == ([0, 1] if round_ < 3 else [0, 2]), "an index that is abandoned is replaced"
        link.hand_back(0)
        link.give_up(1)
        link.want(0, V0)
        link.turn()
    assert lab.permits.abandoned() == {1}


def test_what_is_given_up_while_the_hub_is_away_stays_ours_until_it_hears() -> None:
    lab = Lab(total=2)
    link = lab.link()
    assert granted(lab, link, 2) == [0, 1]
    give_up, lab.permits.give_up = lab.permits.give_up, refuse(StreamUnavailableError("away"))
    link.give_up(0)
    for _ in range(4):
        lab.now_s += LEASE_S / 2
        with pytest.raises(StreamUnavailableError):
            link.turn()
    assert [i for i, _ in attempts(lab)] == [0, 1], "its leases ran out: it could not renew them either"
    lab.permits.give_up = give_up
    link.turn()
    assert link.lost() == {1}, "the engine is still at 1, and no longer at 0"
    lab.permits.surrender("other")
    assert granted(lab, link, 9) == [0], "which it may start again at once"


def test_a_finished_group_keeps_its_lease_while_its_region_is_away_but_not_for_ever() -> None:
    lab = Lab(total=2)
    link = HubLink(
        lab.permits, lab.runs, lab.evaluations, producer="p", lease_ms=LEASE_MS, poll_ms=1, status=lambda: None,
        hold_s=200, clock=lambda: lab.now_s,
    )  # fmt: skip
    link._next_status = float("inf")
    assert granted(lab, link, 2) == [0, 1]
    link.hold(0)
    link.want(0, V0)
    for _ in range(6):  # 180 s
        lab.now_s += LEASE_S / 2
        link.turn()
    assert attempts(lab) == []
    for _ in range(4):
        lab.now_s += LEASE_S / 2
        link.turn()
    assert attempts(lab) == [(0, 1)], "1, which is being sampled, is still held"
    link.release(0)


def test_a_finished_group_whose_lease_ran_out_may_be_sampled_again_here_at_once() -> None:
    """Its region is away, and for a while the hub was too. Kept back until the region has it, the permit would be nobody's."""
    lab = Lab(total=2)
    link = lab.link()
    assert granted(lab, link, 2) == [0, 1]
    link.hold(0)
    lab.now_s += 1.1 * LEASE_S
    assert attempts(lab) == [(0, 1), (1, 1)]
    link.turn()
    assert link.lost() == {1}, "the engine is not at 0 any more"
    lab.permits.surrender("other")
    link.want(2, V0)
    lab.now_s += LEASE_S
    link.turn()
    assert taken(link) == [0], "1 is still being sampled"
    link.release(1)
    assert taken(link) == [1]


def test_a_restarted_producer_keeps_what_its_spool_holds_and_hands_back_the_rest() -> None:
    lab = Lab()
    assert granted(lab, lab.link(), 6) == [0, 1, 2, 3, 4, 5]
    again = lab.link()  # the same producer id
    again.resume(spooled=[1, 2], waiting=[2])
    again.want(0, V0)
    again.turn()
    assert [i for i, _ in attempts(lab, most=4)] == [0, 3, 4, 5]
    lab.permits.surrender("other")
    for _ in range(5):
        lab.now_s += LEASE_S / 2
        again.turn()
    assert attempts(lab, most=5) == [(0, 2), (1, 1), (3, 2), (4, 2), (5, 2)], "2 waits in the spool, 1 is in its stream"
    assert granted(lab, again, 2) == [6, 7], "and 2 is not started again"


def test_nothing_is_taken_before_the_former_process_is_cleared_away() -> None:
    """Else what was just taken would go with it."""
    lab = Lab()
    granted(lab, lab.link(), 2)
    again = lab.link()
    surrender, lab.permits.surrender = lab.permits.surrender, refuse(BackpressureError("disk full"))
    again.want(3, V0)
    with pytest.raises(BackpressureError):
        again.turn()
    lab.permits.surrender = surrender
    assert granted(lab, again, 3) == [0, 1, 2]
    again.turn()
    lab.now_s += LEASE_S / 2
    again.turn()
    assert again.lost() == set()


def test_a_neighbour_that_is_gone_is_cleared_away_too() -> None:
    lab = Lab()
    granted(lab, lab.link("east-dead"), 4)
    link = lab.link()
    link.surrender_for("east-dead", spooled=[1])
    assert granted(lab, link, 4) == [0, 2, 3, 4]


def test_permits_whose_weights_do_not_come_are_handed_back_and_not_taken_again() -> None:
    """A region whose replica is stale must not sit on the groups that the next step needs."""
    lab = Lab(max_age=0)
    lab.permits.advance(1)
    stale, fresh = lab.link("stale"), lab.link("fresh")
    assert granted(lab, stale, 8, V0) == []
    assert granted(lab, fresh, 8, V1) == []
    for _ in range(6):
        lab.now_s += LEASE_S / 4
        stale.turn()
    assert granted(lab, fresh, 8, V1) == [0, 1, 2, 3, 4, 5, 6, 7]
    for index in range(8):
        fresh.hand_back(index)
    fresh.want(0, V1)
    fresh.turn()
    stale.turn()
    assert lab.permits.state().returned == 8, "it does not take what it could not start"
    assert stale.wants_policy == V1
    assert granted(lab, stale, 8, V1) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_producer_that_stops_hands_back_what_it_had_not_started() -> None:
    lab = Lab()
    link = lab.link()
    assert granted(lab, link, 2) == [0, 1]
    link.want(3, V0)
    link.turn()
    link.hand_back(1)
    link.hold(0)
    link.start()
    link.close()
    assert [i for i, _ in attempts(lab, most=4)] == [1, 2, 3, 4], "0 is finished"
    assert lab.permits.abandoned() == set()


def test_a_full_hub_still_takes_what_frees_and_is_back_in_use_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab()
    link = lab.link()
    assert granted(lab, link, 2) == [0, 1]
    full = refuse(BackpressureError("used memory > 'maxmemory'"))
    monkeypatch.setattr(lab.permits, "take", full)
    monkeypatch.setattr(lab.runs, "report_producer", full)
    link.give_up(0)
    link.want(2, V0)
    lab.now_s += LEASE_S * 0.9
    lab.runs.finish("over")
    with pytest.raises(BackpressureError):
        link.turn()
    assert link.finished == "over"
    monkeypatch.undo()
    lab.now_s += LEASE_S * 0.9
    assert attempts(lab, most=2) == [(0, 1), (2, 0)], "0 was given up, 1 renewed"
    pauses = []
    monkeypatch.setattr(lab.permits, "take", full)
    monkeypatch.setattr(
        link._wake, "wait", lambda pause: pauses.append(pause) or (len(pauses) > 20 and link._stop.set())
    )
    link._run()
    assert max(pauses) == RETRY_LAST_S <= 2.0


def test_a_hub_that_comes_back_under_a_held_permit_grants_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub forgot our lease and handed the index out as new, to us: the engine is at it already."""
    lab = Lab()
    link = lab.link()
    assert granted(lab, link, 2) == [0, 1]
    fresh = MemoryPermits("run", clock_ms=lambda: lab.now_s * 1000)
    fresh.reset(epoch=1, version=0, batch=4, max_age=1, total=100, accepted=())
    monkeypatch.setattr(link, "_permits", fresh)
    assert granted(lab, link, 2) == []
    assert [p.group_index for p in fresh.take("q", max_groups=1, lease_ms=LEASE_MS)] == [2]
    lab.now_s += LEASE_S / 2
    link.want(0, V0)
    link.turn()
    assert (link.lost(), taken(link)) == (set(), [])
    assert isinstance(fresh.take("q", max_groups=1, lease_ms=LEASE_MS)[0], Permit)


def test_a_shard_that_takes_longer_than_its_lease_stays_ours() -> None:
    lab = Lab()
    link, other = lab.link(), lab.link("west-1")
    lab.evaluations.request(V0, 1)
    link.want(0, V0)
    other.want(0, V0)
    link.turn()
    for round_ in range(8):  # granted, and then under way
        lab.now_s += EVALUATION_LEASE_MS / 2000
        link.turn()
        other.turn()
        if round_ == 3:
            assert link.take_evaluation() == (V0, 0, 1)
    assert other.take_evaluation() is None
    link.drop_evaluation()
    lab.now_s += 2 * EVALUATION_LEASE_MS / 1000
    other.turn()
    assert other.take_evaluation() == (V0, 0, 1)
