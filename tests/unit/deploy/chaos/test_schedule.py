from __future__ import annotations

import itertools

import pytest

from anabranch.deploy.chaos.schedule import KINDS, choose, draw, make, slug
from anabranch.schemas.errors import UsageError

REGIONS = ("east", "west")
ALL = choose(())


def test_the_same_seed_draws_the_same_list_and_another_seed_another() -> None:
    one, again, other = (draw(faults=60, seed=s, seconds_between=5.0, regions=REGIONS, kinds=ALL) for s in (3, 3, 4))
    assert one == again
    assert [p.kind for p in one] != [p.kind for p in other]


@pytest.mark.parametrize("seed", range(5))
def test_every_kind_comes_when_there_is_room_for_it(seed: int) -> None:
    plans = draw(faults=len(KINDS), seed=seed, seconds_between=5.0, regions=REGIONS, kinds=ALL)
    assert {p.kind for p in plans} == set(KINDS)


def test_plans_keep_to_their_kind_and_come_in_order_of_time() -> None:
    plans = draw(faults=400, seed=1, seconds_between=5.0, regions=REGIONS, kinds=ALL)
    assert [p.number for p in plans] == list(range(1, 401))
    assert all(a.at_s < b.at_s for a, b in itertools.pairwise(plans))
    assert 4.5 < plans[-1].at_s / 400 < 5.5
    for plan in plans:
        kind = KINDS[plan.kind]
        assert plan.target in kind.targets(REGIONS)
        assert kind.seconds[0] <= plan.seconds <= kind.seconds[1]
        assert plan.amount in kind.amounts
        assert make(plan).describe().startswith(f"{plan.kind} {plan.target}")


def test_fewer_faults_than_kinds() -> None:
    plans = draw(faults=3, seed=1, seconds_between=5.0, regions=REGIONS, kinds=ALL)
    assert len({p.kind for p in plans}) == 3
    assert draw(faults=0, seed=1, seconds_between=5.0, regions=REGIONS, kinds=ALL) == []


def test_only_some_kinds() -> None:
    kinds = choose(["kill-learner", "disk-full"])
    plans = draw(faults=20, seed=1, seconds_between=5.0, regions=("east",), kinds=kinds)
    assert {p.kind for p in plans} == {"kill learner", "disk full"}
    assert {p.target for p in plans} == {"learner", "run", "spool-east", "redis-east"}


def test_an_unknown_kind_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"no such kind of fault: kill-everything; there are .*kill-learner"):
        choose(["kill-everything"])
    assert len({slug(name) for name in KINDS}) == len(KINDS)
    assert all(name == name.lower() and " " not in name for name in map(slug, KINDS))
