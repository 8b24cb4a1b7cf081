"""Two records of one step: equal to the bit, or what differs, where and how far."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest

from anabranch.consumers.step_comparison import compare, surroundings
from anabranch.schemas.step_record import ROLLOUT_SCHEMA, UpdateResult
from tests.step_records import facts, rows_of

FACTS = facts()


def table(change: dict[int, dict[str, Any]] | None = None) -> pa.Table:
    rows = rows_of(FACTS)
    for at, columns in (change or {}).items():
        rows[at] |= columns
    return pa.Table.from_pylist(rows, ROLLOUT_SCHEMA)


def test_the_same_is_equal():
    assert compare((FACTS, table()), (FACTS, table())) == []


def test_nan_of_the_same_bits_is_equal_and_minus_zero_is_not_zero():
    nan = table({0: {"logprob": [math.nan, 0.0]}})
    assert compare((FACTS, nan), (FACTS, nan)) == []
    (one,) = compare((FACTS, nan), (FACTS, table({0: {"logprob": [math.nan, -0.0]}})))
    assert (one.what, one.where, one.most) == ("logprob", "east/east-0-ab/8/0, token 1", 0.0)


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [("advantage", 0.25, "east/east-0-ab/8/1"), ("weight", 0.5, "east/east-0-ab/8/1"), ("update", 1, "east/east-0-ab/8/1"),
     ("kept", [True, True], "east/east-0-ab/8/1, token 1"), ("factor", [1.0, 1.0], "east/east-0-ab/8/1, token 1"),
     ("logprob", [-0.25, -1.0], "east/east-0-ab/8/1, token 0"), ("loss_share", 0.2, "east/east-0-ab/8/1"),
     ("proximal", [0.0, 0.0], "east/east-0-ab/8/1"), ("entropy", [1.0], "east/east-0-ab/8/1")],
)  # fmt: skip
def test_each_difference_is_located(name: str, value: Any, where: str):
    (one,) = compare((FACTS, table()), (FACTS, table({1: {name: value}})))
    assert (one.what, one.where) == (name, where)


def test_the_first_is_nearest_to_the_cause():
    later = table({0: {"advantage": 1.0, "factor": [2.0, None], "loss_share": 1.0}})
    again = facts(updates=[UpdateResult.of(0.2, 1.5, applied=True)], loss=0.2, loss_bits=(0.2).hex())
    found = compare((FACTS, table()), (again, later))
    assert [one.what for one in found] == ["advantage", "factor", "loss_share", "loss"]
    assert found[-1].most == pytest.approx(0.1)


def test_how_far_is_told_in_units_of_the_last_place():
    near = table({0: {"logprob": [-0.5 - 2**-24, -1.0]}, 1: {"logprob": [-0.5 - 2**-22, -1.0]}})
    (one,) = compare((FACTS, table()), (FACTS, near))
    assert (one.count, one.most_ulps) == (2, 4)
    across_zero = compare((FACTS, table({0: {"loss_share": 5e-324}})), (FACTS, table({0: {"loss_share": -5e-324}})))
    assert across_zero[0].most_ulps == 2


def test_another_learning_rate_and_fewer_updates_are_told():
    again = facts(lr=2e-5, updates=[UpdateResult.of(0.1, 1.5, applied=False)])
    assert [(one.what, one.replayed) for one in compare((FACTS, table()), (again, table()))] == [
        ("lr", "2e-05"),
        ("applied", "False"),
    ]
    two = facts(updates=[UpdateResult.of(0.1, 1.5, applied=True)] * 2)
    assert [one.what for one in compare((FACTS, table()), (two, table()))] == ["updates"]


def test_lists_that_were_not_recorded_are_not_compared():
    short = facts(tokens=False)
    without = table({at: dict.fromkeys(("logprob", "entropy", "factor", "kept")) for at in range(4)})
    assert compare((short, without), (FACTS, table())) == []


def test_rollouts_of_another_number_are_all_that_is_told():
    (one,) = compare((FACTS, table()), (FACTS, table().slice(0, 3)))
    assert (one.what, one.recorded, one.replayed) == ("rollouts", "4", "3")


def test_what_is_not_as_it_was_is_named():
    assert surroundings(FACTS, FACTS) == []
    here = facts(cpu="two", threads=2, packages={"torch": "3", "numpy": "2"})
    assert surroundings(FACTS, here) == [
        "cpu: one then, two now",
        "threads: 1 then, 2 now",
        "numpy None then, 2 now",
        "torch 2 then, 3 now",
    ]
