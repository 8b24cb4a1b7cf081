"""What permits promise (transport/permits.py), for every implementation: bound, leases, epochs."""

from __future__ import annotations

import time

import pytest

from anabranch.schemas.errors import ConfigError, TemporaryError
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.permits import Permit
from anabranch.transport.redis_permits import RedisPermits
from tests.contract.permit_worlds import LONG_MS, opened, reset, take


def test_nothing_is_handed_out_before_a_learner_opens_the_run(make):
    permits = make()
    assert take(permits, 10) == []
    with pytest.raises(TemporaryError, match="no permits"):
        permits.advance(1)


def test_permits_stop_at_the_age_bound_and_go_on_with_the_next_version(make):
    permits = opened(make)  # (1 + 0 + 1)·4 = 8
    assert take(permits, 5) == [0, 1, 2, 3, 4]
    assert take(permits, 5, "q") == [5, 6, 7]
    assert take(permits, 5) == []
    permits.advance(1)
    assert take(permits, 50) == [8, 9, 10, 11]
    permits.advance(0)
    permits.advance(1)
    assert take(permits, 50) == []


def test_a_learner_of_an_older_epoch_raises_nothing(make):
    permits = opened(make, epoch=2)
    with pytest.raises(ConfigError, match="epoch 2 is open"):
        permits.advance(50, epoch=1)
    assert take(permits, 50) == list(range(8))
    permits.advance(1, epoch=2)
    assert take(permits, 50) == [8, 9, 10, 11]


def test_an_index_that_nobody_was_given_opens_an_epoch_as_fast_as_ever(make):
    """An entry may claim any: the hub must not list all indices below it."""
    permits = opened(make, accepted=[0, 1, 10**15])
    assert permits.state().next_index == 2
    assert take(permits, 50) == [2, 3, 4, 5, 6, 7]


def test_the_run_ends_at_its_total(make):
    permits = opened(make, total=6)
    assert take(permits, 100) == [0, 1, 2, 3, 4, 5]
    permits.advance(50)
    assert take(permits, 100) == []


def test_minimum_policy_keeps_the_age_of_a_group_within_the_bound(make):
    permits = opened(make, epoch=3, version=2, batch=2, max_age=2)
    got = {p.group_index: p.min_policy for p in permits.take("p", max_groups=10, lease_ms=LONG_MS)}
    # (2 + 2 + 1)·2 = 10; group g trains at step max(g // 2, 2) at the earliest
    assert got == {g: PolicyVersion(3, max(g // 2, 2) - 2) for g in range(10)}


def test_with_no_age_allowed_every_group_waits_for_its_own_version(make):
    permits = opened(make, max_age=0, batch=2)
    assert permits.take("p", max_groups=9, lease_ms=LONG_MS) == [
        Permit(0, 0, PolicyVersion(1, 0)),
        Permit(1, 0, PolicyVersion(1, 0)),
    ]
    permits.advance(1)
    assert {p.min_policy for p in permits.take("p", max_groups=9, lease_ms=LONG_MS)} == {PolicyVersion(1, 1)}


def test_an_expired_lease_goes_to_whoever_asks_next_as_another_attempt(make):
    permits = opened(make)
    assert take(permits, 2, "dead", lease_ms=500) == [0, 1]
    assert take(permits, 1, "alive") == [2]
    time.sleep(0.55)
    got = permits.take("alive", max_groups=3, lease_ms=LONG_MS)
    assert [(p.group_index, p.attempt) for p in got] == [(0, 1), (1, 1), (3, 0)]
    assert permits.renew("dead", [0, 1], lease_ms=LONG_MS) == [0, 1]
    assert permits.renew("alive", [0, 1, 2, 3, 77], lease_ms=LONG_MS) == [77]


def test_a_renewed_lease_does_not_expire(make):
    permits = opened(make)
    assert take(permits, 1, lease_ms=40) == [0]
    assert permits.renew("p", [0], lease_ms=LONG_MS) == []
    time.sleep(0.05)
    assert take(permits, 1, "q") == [1]


def test_a_group_that_arrived_is_not_handed_out_again(make):
    permits = opened(make)
    assert take(permits, 2, lease_ms=10) == [0, 1]
    permits.settle([0])
    time.sleep(0.02)
    assert take(permits, 2, "q") == [1, 2]
    assert permits.renew("p", [0], lease_ms=LONG_MS) == [0]


def test_a_dropped_group_is_handed_out_again_before_new_ones(make):
    permits = opened(make)
    take(permits, 6)
    permits.settle([4, 1])
    permits.give_back([4, 1])
    permits.give_back([99])  # never handed out: ignored
    got = permits.take("q", max_groups=3, lease_ms=LONG_MS)
    assert [(p.group_index, p.attempt) for p in got] == [(1, 1), (4, 1), (6, 0)]
    permits.give_back([1])
    assert [(p.group_index, p.attempt) for p in permits.take("q", max_groups=1, lease_ms=LONG_MS)] == [(1, 2)]
    permits.settle([1])
    permits.give_back([1])
    assert [(p.group_index, p.attempt) for p in permits.take("q", max_groups=1, lease_ms=LONG_MS)] == [(1, 1)], (
        "attempts are counted until one arrives"
    )


def test_a_group_that_came_too_late_does_not_end_the_attempt_that_followed_it(make):
    """A region that comes back brings many at once; others are sampling their indices by then."""
    permits = opened(make)
    take(permits, 8, lease_ms=10)
    time.sleep(0.02)
    assert take(permits, 2, "q") == [0, 1]
    permits.give_back([0, 1, 2], attempts={0: 0, 1: 1, 2: 0})
    assert permits.renew("q", [0, 1], lease_ms=LONG_MS) == [1], "the second attempt at 1 itself was dropped"
    assert take(permits, 2) == [1, 2]


def test_a_late_arrival_takes_its_index_back_from_the_returned(make):
    permits = opened(make)
    take(permits, 2)
    permits.give_back([0])
    permits.settle([0])
    assert take(permits, 1) == [2]


def test_a_restarted_learner_returns_what_nobody_works_on(make):
    permits = opened(make)
    assert take(permits, 8) == list(range(8))
    permits.settle([0, 1, 2, 3, 4])
    permits.advance(1)
    # The checkpoint knew version 0 and nothing trained; 2 and 3 still wait in the stream, 5 to 7 are being sampled.
    reset(permits, epoch=2, accepted=[2, 3])
    got = permits.take("q", max_groups=10, lease_ms=LONG_MS)
    assert [p.group_index for p in got] == [0, 1, 4], "5 to 7 are leased, 8 is beyond (1 + 0 + 1)·4 again"
    assert {p.min_policy.epoch for p in got} == {2}


def test_indices_above_a_lowered_limit_wait_until_it_rises_again(make):
    permits = opened(make, version=3)
    assert len(take(permits, 100, lease_ms=5)) == 20
    time.sleep(0.01)
    reset(permits, epoch=2, version=0)
    assert take(permits, 100) == list(range(8))
    permits.advance(1)
    assert take(permits, 100) == [8, 9, 10, 11]


def test_a_hub_that_lost_everything_is_restored_from_what_the_learner_knows(make):
    permits = opened(make, epoch=5, version=2, accepted=[*range(8), 10, 11])
    assert take(permits, 100) == [8, 9, 12, 13, 14, 15]


def test_a_stale_learner_cannot_open_an_older_epoch(make):
    permits = opened(make, epoch=4)
    with pytest.raises(ConfigError, match="another learner"):
        reset(permits, epoch=3)
    reset(permits, epoch=4)


def test_a_repeated_take_gets_the_same_permits(client, keys):
    permits = RedisPermits(client, keys)
    reset(permits)
    names = [keys.permits, keys.leases, keys.holders, keys.returned, keys.attempts, keys.takes, keys.abandoned]
    call = lambda nonce: permits._acts["take"](keys=names, args=["p", 3, LONG_MS, nonce])  # noqa: E731
    assert call("a") == call("a") == [1, 0, 4, 1, 0, 0, 0, 1, 0, 0, 2, 0, 0]
    assert call("b")[4::3] == [3, 4, 5]
    permits.settle([3])
    assert call("b")[4::3] == [4, 5]
