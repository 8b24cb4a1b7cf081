"""Whether drops are biased: figures that are right, and words only where there is something to say."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.consumers.drops import CONSUMED_FATE, Mean, comparable, everywhere, tally, verdicts
from anabranch.schemas.fates import FateRecord
from tests.fates import record


def groups(
    count: int, fate: str, *, length: float, reward: float = 0.5, region: str = "east", seed: int = 0
) -> list[FateRecord]:
    """Of 4 rollouts; lengths and rewards scatter by a tenth around what is asked for."""
    rng = random.Random(seed)
    return [
        record(
            seq=seq, fate=fate, region=region, rollouts=4, cut=seq % 2, tokens=round(4 * length * rng.gauss(1, 0.1)),
            reward=reward * rng.gauss(1, 0.1),
        )
        for seq in range(count)
    ]  # fmt: skip


@given(st.lists(st.floats(-1e3, 1e3), max_size=30), st.lists(st.floats(-1e3, 1e3), max_size=30))
def test_a_mean_and_its_error_are_those_of_the_numbers_however_they_came(a: list[float], b: list[float]) -> None:
    one, other = Mean(), Mean()
    for mean, values in ((one, a), (other, b)):
        for value in values:
            mean.add(value)
    one.join(other)
    values = np.array(a + b)
    assert one.count == len(values)
    if len(values):
        assert one.mean == pytest.approx(values.mean(), abs=1e-9)
    if len(values) > 1:
        assert one.error == pytest.approx(values.std(ddof=1) / math.sqrt(len(values)), abs=1e-9)
    else:
        assert math.isnan(one.error)


def test_figures_by_region_and_fate_and_over_all() -> None:
    tallies = tally(
        [
            record(seq=0, rollouts=2, tokens=20, cut=1, reward=1.0, age=0),
            record(seq=1, rollouts=2, tokens=40, cut=0, reward=0.0, age=2, fate="dropped:zero_variance"),
            record(seq=2, rollouts=4, tokens=400, cut=4, reward=0.25, age=9, fate="dropped:age"),
            record(seq=0, rollouts=2, tokens=60, cut=1, region="west"),
        ]
    )
    kept = tallies["east"][CONSUMED_FATE]
    assert (kept.groups, kept.length.mean, kept.cut_share, kept.reward.mean, kept.age.mean) == (2, 15.0, 0.25, 0.5, 1.0)
    assert tallies["east"]["dropped:age"].length.mean == 100.0
    assert everywhere(tallies)[CONSUMED_FATE].length.mean == pytest.approx(20.0)
    assert everywhere(tallies)[CONSUMED_FATE].groups == 3


def test_slow_groups_that_are_dropped_more_are_told() -> None:
    (said,) = verdicts(tally(groups(200, "trained", length=50) + groups(40, "dropped:age", length=80, seed=1)))
    assert said.startswith("dropped:age: slow groups are dropped more than fast ones: 8")
    assert "what is trained is shorter than what was sampled" in said


def test_groups_that_score_differently_are_told() -> None:
    trained, dropped = (
        groups(200, "trained", length=50, reward=0.4),
        groups(40, "dropped:age", length=50, reward=0.8, seed=1),
    )
    (said,) = verdicts(tally(trained + dropped))
    assert "good groups are dropped more than others: reward 0.8" in said
    assert "looks worse" in said


def test_a_region_whose_groups_are_dropped_more_is_told() -> None:
    both = groups(200, "trained", length=50) + groups(200, "trained", length=50, region="west", seed=1)
    (said,) = verdicts(tally(both + groups(40, "dropped:age", length=50, region="west", seed=2)))
    assert said.startswith("region west: its groups are dropped more than others': 16.7% against 0.0%")


def test_a_region_of_which_everything_is_dropped_is_told_too() -> None:
    whole = groups(40, "trained", length=50) + groups(40, "dropped:age", length=50, region="west", seed=1)
    (said,) = verdicts(tally(whole))
    assert said.startswith(
        "region west: its groups are dropped more than others': 100.0% against 0.0%, 9 standard errors"
    )


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_said_of_what_is_alike_or_too_few(seed: int) -> None:
    alike = groups(200, "trained", length=50, seed=seed) + groups(200, "dropped:age", length=50, seed=seed + 100)
    assert verdicts(tally(alike)) == []
    assert verdicts(tally(groups(200, "trained", length=50) + groups(9, "dropped:age", length=500))) == []
    assert verdicts(tally([])) == []


def test_whether_there_is_enough_to_compare() -> None:
    few, many = groups(9, "dropped:age", length=50), groups(10, "dropped:age", length=50)
    assert not comparable(tally([]))
    assert not comparable(tally(groups(200, "trained", length=50)))
    assert not comparable(tally(groups(200, "trained", length=50) + few))
    assert not comparable(tally(groups(9, "trained", length=50) + many))
    assert comparable(tally(groups(10, "trained", length=50) + many))


def test_numbers_that_do_not_scatter_at_all() -> None:
    same = [record(seq=s) for s in range(20)] + [record(seq=s, fate="dropped:age") for s in range(20, 40)]
    assert verdicts(tally(same)) == []
    other = [record(seq=s, fate="dropped:age", tokens=200) for s in range(20, 40)]
    assert "slow groups are dropped more" in verdicts(tally(same[:20] + other))[0]
