"""Admission and assembly: trained at most once, never too old, and in an order that arrival has no part in."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.consumers.arrivals import Arrival
from anabranch.consumers.batcher import GroupQueue, TrainedSet, Verdict, group_age
from anabranch.schemas.versions import PolicyVersion, VersionSpan
from tests.groups import group, rollout


def arrival(
    index: int,
    entry_id: str | None = None,
    *,
    seq: int | None = None,
    region: str = "east",
    version: int = 0,
    epoch: int = 1,
) -> Arrival:
    """Delivery `seq` (by default the index) of the region's producer."""
    made = group(index, version=version, epoch=epoch, region=region)
    return Arrival(region, entry_id or f"1-{index}", "p", index if seq is None else seq, made, 100)


def queue(*arrivals: Arrival, trained: TrainedSet | None = None) -> GroupQueue:
    made = GroupQueue(trained or TrainedSet())
    for a in arrivals:
        assert made.offer(a) is Verdict.QUEUED
    return made


def taken(batch: list[Arrival] | None) -> list[int]:
    assert batch is not None
    return [a.group.group_index for a in batch]


NOW = PolicyVersion(1, 10)


def test_the_lowest_indices_first_and_only_whole_batches() -> None:
    waiting = queue(*(arrival(i) for i in (5, 2, 9, 0)))
    assert taken(waiting.take(3)) == [0, 2, 5]
    assert waiting.take(2) is None
    assert waiting.indices == {9}, "what was not enough still waits"
    assert taken(waiting.take(1)) == [9]


def test_the_same_delivery_again_is_seen_until_it_is_released() -> None:
    """A reconnect delivers what is pending again: queued or trained but not settled, it must not be dropped."""
    waiting = queue(arrival(1))
    assert waiting.offer(arrival(1)) is Verdict.SEEN
    (taken_out,) = waiting.take(1) or []
    assert waiting.offer(arrival(1)) is Verdict.SEEN
    assert waiting.release(taken_out) == ["1-1"]
    assert not waiting.knows(arrival(1))


def test_a_delivery_that_comes_again_under_another_entry_id_is_the_same_one() -> None:
    """A server that forgot its last second gets it again; a copy that somebody added looks the same."""
    waiting = queue(arrival(1, "5-0"))
    assert waiting.offer(arrival(1, "9-0")) is Verdict.SEEN
    (taken_out,) = waiting.take(1) or []
    assert waiting.offer(arrival(1, "12-0")) is Verdict.SEEN
    assert waiting.offer(arrival(1, "9-0")) is Verdict.SEEN
    assert waiting.entries(taken_out) == waiting.release(taken_out) == ["12-0", "9-0", "5-0"], "all are to be settled"


def test_another_delivery_of_a_group_is_a_duplicate_wherever_it_comes_from() -> None:
    waiting = queue(arrival(1))
    assert waiting.offer(arrival(1, "1-99", seq=99)) is Verdict.DUPLICATE
    assert waiting.offer(arrival(1, region="west")) is Verdict.DUPLICATE
    waiting.take(1)
    assert waiting.offer(arrival(1, "1-99", seq=99)) is Verdict.DUPLICATE
    assert len(waiting) == 0


def test_names_in_two_regions_may_be_equal() -> None:
    waiting = queue(arrival(1, "7-0", seq=3))
    assert waiting.offer(arrival(2, "7-0", seq=3, region="west")) is Verdict.QUEUED
    assert waiting.depth() == {"east": 1, "west": 1}


def test_after_a_resume_trained_groups_stay_trained() -> None:
    made = GroupQueue(TrainedSet(below=3, beyond=[5], abandoned=[7]))
    assert [made.offer(arrival(i)) for i in (2, 5, 7)] == [Verdict.DUPLICATE] * 3
    assert made.offer(arrival(4)) is Verdict.QUEUED


def test_abandoned_indices_do_not_keep_the_set_from_closing() -> None:
    trained = TrainedSet()
    trained.add(range(1, 100))
    assert (trained.below, len(trained.beyond)) == (0, 99)
    trained.skip([0, 200])
    assert (trained.below, trained.beyond, trained.abandoned) == (100, set(), {0, 200})
    trained.add(range(100, 200))
    assert trained.below == 201
    assert 200 in trained
    assert 201 not in trained


def test_the_sweep_removes_what_is_older_than_the_bound_and_nothing_else() -> None:
    waiting = queue(*(arrival(i, version=i) for i in range(11)))
    old = waiting.sweep(NOW, {}, 3)
    assert sorted(a.group.group_index for a in old) == [0, 1, 2, 3, 4, 5, 6]
    assert waiting.indices == {7, 8, 9, 10}
    assert waiting.sweep(NOW, {}, 3) == []


def test_a_token_of_weights_that_do_not_exist_yet_is_told_apart() -> None:
    """A hub that lost its data can hand out a tag twice; such a token has no age."""
    waiting = queue(arrival(0, version=11), arrival(1, version=10), arrival(2, version=3, epoch=2), arrival(3))
    false = waiting.from_the_future(NOW)
    assert sorted(a.group.group_index for a in false) == [0, 2]
    assert waiting.indices == {1, 3}
    assert waiting.offer(arrival(0, seq=50, version=10)) is Verdict.QUEUED, "it may come again, truly"


def test_age_zero_admits_the_present_version_alone() -> None:
    waiting = queue(arrival(0, version=9), arrival(1, version=10))
    waiting.sweep(NOW, {}, 0)
    assert waiting.indices == {1}


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    """One token of one rollout, sampled before a swap in mid-rollout, decides."""
    spans = tuple(VersionSpan(PolicyVersion(1, v), start) for v, start in ((6, 0), (9, 1), (10, 2)))
    mixed = replace(group(0), rollouts=(rollout(0, spans=(VersionSpan(NOW, 0),)), rollout(1, tokens=3, spans=spans)))
    assert group_age(Arrival("east", "1-1", "p", 1, mixed, 1), NOW, {}) == 4


@pytest.mark.parametrize(
    ("version", "age"),
    [(6, 0 + 2), (4, 2 + 2), (7, 2 + 1), (9, 2 + 3)],
    ids=["at the fork", "before it", "just beyond it", "far beyond it"],
)
def test_ages_after_a_fork(version: int, age: int) -> None:
    """Epoch 2 forked at version 6 and is at 8: older tokens lie on its own line up to 6, and beside it from 7 on."""
    before = arrival(0, version=version, epoch=1)
    now = PolicyVersion(2, 8)
    assert group_age(before, now, {2: 6}) == age
    assert len(queue(before).sweep(now, {2: 6}, age)) == 0
    assert len(queue(before).sweep(now, {2: 6}, age - 1)) == 1


def test_tokens_on_both_sides_of_a_fork_count_by_the_farther() -> None:
    spans = (VersionSpan(PolicyVersion(1, 9), 0), VersionSpan(PolicyVersion(2, 7), 1))
    mixed = replace(group(0), rollouts=(rollout(0, spans=spans), rollout(1, spans=spans)))
    assert group_age(Arrival("east", "1-1", "p", 1, mixed, 1), PolicyVersion(2, 8), {2: 6}) == 5


def test_a_swept_group_may_come_again_with_fresh_tokens() -> None:
    waiting = queue(arrival(3, "1-1", version=0))
    (swept,) = waiting.sweep(NOW, {}, 5)
    assert waiting.offer(arrival(3, "1-1", version=0)) is Verdict.SEEN, "until its fate is written down"
    assert waiting.release(swept) == ["1-1"]
    assert waiting.offer(arrival(3, "1-50", seq=50, version=10)) is Verdict.QUEUED
    assert taken(waiting.take(1)) == [3]


def test_clear_hands_over_everything_that_waits() -> None:
    waiting = queue(*(arrival(i) for i in range(4)))
    waiting.take(2)
    assert sorted(a.group.group_index for a in waiting.clear()) == [2, 3]
    assert len(waiting) == 0
    assert waiting.offer(arrival(0)) is Verdict.SEEN, "trained and not acknowledged yet"


@given(st.lists(st.integers(0, 40), unique=True), st.integers(0, 10))
def test_a_trained_set_is_a_set(indices: list[int], below: int) -> None:
    trained = TrainedSet(below)
    for index in indices:
        trained.add([index])
    assert trained.indices() == set(range(below)) | set(indices)
    assert all(index in trained for index in trained.indices())
    assert trained.below not in trained
    assert TrainedSet(trained.below, trained.beyond).indices() == trained.indices()
    assert all(index > trained.below for index in trained.beyond), "compact: what follows on is folded in"


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 25), st.integers(0, 12), st.sampled_from(["east", "west"])),
    max_size=40,
    unique_by=lambda row: row[0],
)


@given(ARRIVALS, st.integers(1, 5), st.randoms(use_true_random=False))
def test_batches_do_not_depend_on_the_order_of_arrival(rows, count: int, shuffler: random.Random) -> None:
    def batches(order) -> list[list[int]]:
        waiting = queue(*(arrival(i, version=v, region=r) for i, v, r in order))
        waiting.sweep(NOW, {}, 4)
        made = []
        while (batch := waiting.take(count)) is not None:
            made.append(taken(batch))
        return made

    shuffled = list(rows)
    shuffler.shuffle(shuffled)
    assert batches(shuffled) == batches(rows)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), st.integers(0, 12), st.integers(0, 3)),
        st.tuples(st.just("take"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("release"), st.just(0), st.just(0)),
        st.tuples(st.just("skip"), st.integers(0, 12), st.just(0)),
        st.tuples(st.just("step"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(EVENTS)
def test_whatever_comes_a_group_is_trained_once_and_never_too_old(events) -> None:
    """`copy` tells several deliveries of one group apart; versions move on between offers and batches."""
    trained: list[int] = []
    version = 0
    waiting = GroupQueue(TrainedSet())
    unreleased: list[Arrival] = []
    for kind, a, copy in events:
        if kind == "offer":
            waiting.offer(arrival(a, f"{version}-{100 * copy + a}", seq=100 * copy + a, version=version))
        elif kind == "step":
            version += 1
        elif kind == "skip":
            waiting._trained.skip([a])
        elif kind == "release":
            assert [a for a in unreleased if not waiting.release(a)] == []
            unreleased = []
        else:
            now = PolicyVersion(1, version)
            unreleased += waiting.sweep(now, {}, 2)
            batch = waiting.take(a)
            if batch is not None:
                assert len(batch) == a
                assert max(group_age(b, now, {}) for b in batch) <= 2
                trained += taken(batch)
                unreleased += batch
    assert len(trained) == len(set(trained))
