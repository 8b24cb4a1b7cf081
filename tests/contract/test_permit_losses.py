"""No capacity is lost for good: groups given up, producers that restart, clocks that step, a hub that forgets."""

from __future__ import annotations

import pytest

from anabranch.schemas.errors import TemporaryError
from anabranch.transport.redis_permits import RedisPermits
from tests.contract.permit_worlds import LONG_MS, opened, reset, shift_clock, size, snapshot, take


def attempts(permits, n: int, producer: str = "p") -> list[tuple[int, int]]:
    return [(p.group_index, p.attempt) for p in permits.take(producer, max_groups=n, lease_ms=LONG_MS)]


def test_a_group_given_up_is_handed_out_again_at_once(make):
    permits = opened(make)
    assert take(permits, 3) == [0, 1, 2]
    assert permits.give_up("p", [1], max_attempts=3) == []
    assert permits.give_up("p", [1], max_attempts=3) == [], "repeated: it has no lease any more"
    assert permits.give_up("q", [0], max_attempts=1) == [], "not its own"
    assert attempts(permits, 2, "q") == [(1, 1), (3, 0)]
    assert permits.renew("p", [0, 1, 2], lease_ms=LONG_MS) == [1]


def test_a_group_given_up_too_often_is_abandoned_and_another_takes_its_place(make):
    permits = opened(make, total=8)
    assert take(permits, 100) == list(range(8))
    for attempt in (1, 2):
        assert permits.give_up("p", [5], max_attempts=3) == []
        assert attempts(permits, 100) == [(5, attempt)]
    assert permits.give_up("p", [5, 6], max_attempts=3) == [5]
    assert permits.give_up("p", [5], max_attempts=3) == [5], "the answer may have been lost"
    assert permits.abandoned() == {5}
    assert attempts(permits, 100) == [(6, 1), (8, 0)], "the total counts groups that can arrive"
    assert take(permits, 100) == []
    permits.give_back([5])
    permits.settle([5])
    assert (take(permits, 100), permits.abandoned()) == ([], {5}), "abandoned is final"


def test_dying_producers_and_stops_do_not_count_against_a_group(make):
    permits = opened(make)
    for _ in range(5):
        assert take(permits, 1) == [0]
        shift_clock(permits, LONG_MS + 1)
        assert take(permits, 1) == [0]
        assert permits.give_up("p", [0], max_attempts=None) == []
    assert attempts(permits, 1) == [(0, 10)]
    assert permits.give_up("p", [0], max_attempts=1) == [0]


def test_the_minimum_policy_knows_what_was_skipped(make):
    permits = opened(make, max_age=1, batch=2, version=1)  # 6 indices
    permits.take("p", max_groups=6, lease_ms=LONG_MS)
    assert permits.give_up("p", [0, 1, 2], max_attempts=1) == [0, 1, 2]
    got = permits.take("p", max_groups=9, lease_ms=LONG_MS)
    assert [(p.group_index, p.min_policy.version) for p in got] == [(6, 0), (7, 1), (8, 1)]


def test_an_abandoned_index_above_a_lowered_limit_adds_nothing_below_it(make):
    permits = opened(make, version=2, max_age=0, total=8, batch=2)  # 6 indices
    assert take(permits, 9) == list(range(6))
    assert permits.give_up("p", [5], max_attempts=1) == [5]
    permits.surrender("p")
    reset(permits, epoch=2, version=0, max_age=0, total=8, batch=2)
    assert take(permits, 9) == [0, 1]
    permits.advance(2)
    assert take(permits, 9) == [2, 3, 4, 6]


def test_a_restarted_producer_hands_back_what_it_does_not_have(make):
    permits = opened(make)
    assert take(permits, 4) == [0, 1, 2, 3]
    assert take(permits, 1, "q") == [4]
    assert permits.surrender("p", keep=[1, 77]) == 3
    assert permits.surrender("p", keep=[1]) == 0
    assert attempts(permits, 4, "q") == [(0, 1), (2, 1), (3, 1), (5, 0)]
    assert permits.renew("p", [0, 1, 2, 3], lease_ms=LONG_MS) == [0, 2, 3]


def test_a_clock_that_steps_forward_costs_leases_and_no_group(make):
    permits = opened(make)
    assert take(permits, 2) == [0, 1]
    shift_clock(permits, 100 * LONG_MS)
    assert permits.renew("p", [1], lease_ms=LONG_MS) == [], "nobody took it: its holder goes on"
    assert attempts(permits, 2, "q") == [(0, 1), (2, 0)]


def test_a_clock_that_steps_back_does_not_keep_a_dead_ones_groups_for_ever(make):
    permits = opened(make)
    assert take(permits, 3, "dead") == [0, 1, 2]
    assert take(permits, 1, "alive") == [3]
    shift_clock(permits, -100 * LONG_MS)
    assert permits.state().expired == 4
    assert permits.renew("alive", [3], lease_ms=LONG_MS) == []
    assert permits.state().leased == {"alive": 1}
    assert take(permits, 4, "q") == [0, 1, 2, 4]
    shift_clock(permits, -0.5 * LONG_MS)
    assert take(permits, 1, "r") == [5], "a small step only lengthens what runs"


def test_leases_of_different_lengths_live_side_by_side(make):
    permits = opened(make)
    assert take(permits, 1, "slow", lease_ms=100 * LONG_MS) == [0]
    assert take(permits, 1, "quick") == [1]
    assert permits.renew("slow", [0], lease_ms=1000 * LONG_MS) == []
    assert take(permits, 1, "quick") == [2], "a long lease is not taken for one of a clock that stepped"


def test_a_hub_that_forgot_what_it_handed_out_learns_it_from_what_arrives(make):
    permits = opened(make)
    take(permits, 1)
    forget = snapshot(permits)
    assert take(permits, 5) == [1, 2, 3, 4, 5]
    forget()
    permits.settle([3])
    permits.settle([10**9])  # no permit can have been given for that
    assert take(permits, 9, "q") == [1, 2, 4, 5, 6, 7]
    permits.advance(1)
    assert take(permits, 9, "q") == [8, 9, 10, 11], "3 is not sampled again"


def test_a_hub_that_forgot_what_was_abandoned_hears_it_from_the_learner(make):
    permits = opened(make, total=8)
    take(permits, 5)
    forget = snapshot(permits)
    take(permits, 3)
    assert permits.give_up("p", [2, 7], max_attempts=1) == [2, 7]
    forget()
    permits.advance(0, epoch=1, abandoned={2, 7})
    assert permits.abandoned() == {2, 7}
    assert permits.renew("p", [2], lease_ms=LONG_MS) == [2]
    assert take(permits, 9, "q") == [5, 6, 8, 9]


def test_what_a_learner_skipped_comes_back_with_its_epoch(make):
    permits = opened(make, total=8)
    reset(permits, epoch=2, total=8, accepted=[0, 1, 2, 3], abandoned=[2, 9])
    assert permits.abandoned() == {2, 9}
    assert take(permits, 99) == [4, 5, 6, 7, 8], "of 0 to 8 one is abandoned, so there are eight"
    reset(permits, epoch=3, total=8, accepted=[0, 1])
    assert permits.abandoned() == {2, 9}, "a checkpoint may be older than the hub"


def test_a_hub_that_forgot_the_newest_epoch_says_so(make):
    permits = opened(make, epoch=4)
    with pytest.raises(TemporaryError, match=r"no permits of epoch 5 .*start the learner again"):
        permits.advance(3, epoch=5)
    assert take(permits, 99) == list(range(8)), "and the older epoch's limit stays"


def test_state_counts_everything_once(make):
    permits = make()
    nothing = permits.state()
    assert (nothing.epoch, nothing.limit, nothing.leased, nothing.abandoned) == (None, 0, {}, 0)
    reset(permits, epoch=3)
    take(permits, 2, "dead", lease_ms=LONG_MS // 2)
    shift_clock(permits, LONG_MS * 3 / 4)
    take(permits, 0, "q")
    assert take(permits, 1, "q") == [0]
    assert take(permits, 3, "p") == [1, 2, 3]
    permits.give_up("p", [1], max_attempts=1)
    permits.give_back([2])
    permits.advance(1)
    state = permits.state()
    assert (state.epoch, state.version, state.next_index, state.limit) == (3, 1, 4, 13)
    assert (state.leased, state.expired, state.returned, state.abandoned) == ({"p": 1, "q": 1}, 0, 1, 1)
    shift_clock(permits, 2 * LONG_MS)
    assert (permits.state().leased, permits.state().expired) == ({}, 2)


def test_what_permits_remember_does_not_grow_with_the_run(make):
    permits = opened(make, batch=4, max_age=1, total=10**9)
    sizes = []
    for version in range(1, 41):
        producer = f"p{version % 3}"
        got = take(permits, 6, producer)
        permits.give_up(producer, got[:1], max_attempts=10)
        permits.surrender(producer, keep=got[1:])
        permits.settle([*got[1:], *take(permits, 1, "q")])
        permits.give_back(got[1:2])
        permits.settle(take(permits, 1, "q"))
        permits.advance(version)
        sizes.append(size(permits))
    assert max(sizes[5:]) <= max(sizes[:5]) + 2


def test_producers_that_never_come_back_are_forgotten(client, keys):
    permits = RedisPermits(client, keys)
    reset(permits, total=10**9, version=10**6)
    for number in range(200):
        permits.settle(take(permits, 1, f"producer-{number}"))
    assert client.hlen(keys.takes) < 80
