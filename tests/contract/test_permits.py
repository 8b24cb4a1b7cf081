"""What permits promise (transport/permits.py), for every implementation."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.schemas.errors import ConfigError, TemporaryError
from anabranch.schemas.keys import Keys
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_permits import MemoryPermits
from anabranch.transport.permits import Permit, Permits
from anabranch.transport.redis_permits import RedisPermits

LONG_MS = 600_000


@pytest.fixture(params=["memory", "redis"])
def make(request: pytest.FixtureRequest, run_name: str) -> Callable[[], Permits]:
    """Fresh permits at every call."""
    if request.param == "memory":
        return MemoryPermits
    client = request.getfixturevalue("client")
    number = itertools.count()
    return lambda: RedisPermits(client, Keys(f"{run_name}.{next(number)}"))


def opened(make: Callable[[], Permits], **settings: int) -> Permits:
    permits = make()
    reset(permits, **settings)
    return permits


def reset(permits: Permits, *, accepted=(), **settings: int) -> None:
    permits.reset(**{"epoch": 1, "version": 0, "batch": 4, "max_age": 1, "total": 100, **settings}, accepted=accepted)


def take(permits: Permits, n: int, producer: str = "p", lease_ms: int = LONG_MS) -> list[int]:
    return [p.group_index for p in permits.take(producer, max_groups=n, lease_ms=lease_ms)]


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
    assert take(permits, 2, "dead", lease_ms=20) == [0, 1]
    assert take(permits, 1, "alive") == [2]
    time.sleep(0.03)
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
    permits.settle([1])
    permits.give_back([1])
    assert [(p.group_index, p.attempt) for p in permits.take("q", max_groups=1, lease_ms=LONG_MS)] == [(1, 2)]


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
    names = [keys.permits, keys.leases, keys.holders, keys.returned, keys.attempts, keys.takes]
    call = lambda nonce: permits._take(keys=names, args=["p", 3, LONG_MS, nonce])  # noqa: E731
    assert call("a") == call("a") == [1, 0, 4, 1, 0, 0, 1, 0, 2, 0]
    assert call("b")[4::2] == [3, 4, 5]
    permits.settle([3])
    assert call("b")[4::2] == [4, 5]


INDEX = st.integers(0, 25)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.sampled_from("pqr"), st.integers(1, 5)),
        st.tuples(st.just("take and die"), st.sampled_from("pqr"), st.integers(1, 5)),
        st.tuples(st.just("renew"), st.sampled_from("pqr"), st.lists(INDEX, max_size=4)),
        st.tuples(st.just("settle"), st.just(""), st.lists(INDEX, max_size=4)),
        st.tuples(st.just("give_back"), st.just(""), st.lists(INDEX, max_size=4)),
        st.tuples(st.just("advance"), st.just(""), st.integers(0, 6)),
        st.tuples(st.just("reset"), st.integers(0, 4), st.sets(INDEX, max_size=10)),
    ),
    max_size=30,
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(actions=ACTIONS, batch=st.integers(1, 4), max_age=st.integers(0, 3), total=st.integers(1, 24))
def test_capacity_and_conservation_under_any_interleaving(make, actions, batch, max_age, total):
    """A model beside the permits: nothing beyond the bound, no index with two holders, none forgotten."""
    permits = make()
    epoch, version = 1, 0
    reset(permits, epoch=epoch, version=0, batch=batch, max_age=max_age, total=total)
    limit = min((max_age + 1) * batch, total)
    next_new = 0
    held: dict[int, str] = {}
    expired: set[int] = set()
    returned: set[int] = set()
    for kind, a, b in actions:
        if kind in ("take", "take and die"):
            free = sorted(i for i in returned | expired if i < limit)
            expected = (free + list(range(next_new, max(next_new, limit))))[:b]
            got = take(permits, b, a, lease_ms=1 if kind == "take and die" else LONG_MS)
            assert got == expected
            assert all(i < min((max_age + version + 1) * batch, total) for i in got)
            next_new = max([next_new, *(i + 1 for i in got)])
            returned -= set(got)
            expired -= set(got)
            held |= dict.fromkeys(got, a)
            if kind == "take and die":
                time.sleep(0.003)
                expired |= set(got)
        elif kind == "renew":
            mine = [i for i in b if held.get(i) == a]
            assert permits.renew(a, b, lease_ms=LONG_MS) == [i for i in b if i not in mine]
            expired -= set(mine)
        elif kind in ("settle", "give_back"):
            getattr(permits, kind)(b)
            for i in b:
                held.pop(i, None)
                expired.discard(i)
                returned.discard(i)
                if kind == "give_back" and i < next_new:
                    returned.add(i)
        elif kind == "advance":
            version = max(version, b)
            permits.advance(b)
            limit = max(limit, min((max_age + version + 1) * batch, total))
        else:
            epoch, version = epoch + 1, a
            reset(permits, epoch=epoch, version=version, batch=batch, max_age=max_age, total=total, accepted=b)
            limit = min((max_age + version + 1) * batch, total)
            next_new = max([next_new, *(i + 1 for i in b)])
            held = {i: p for i, p in held.items() if i not in b}
            expired -= b
            returned = set(range(next_new)) - b - held.keys()
