"""The batch of a recorded step, rebuilt to the bit, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from anabranch.consumers.recorded_batch import recorded_batch
from anabranch.consumers.run_reader import RunReader
from anabranch.schemas.errors import StepRecordError
from anabranch.schemas.step_record import GroupFacts, StepFacts
from anabranch.schemas.trajectory import Group
from tests.groups import group, same
from tests.recorded_groups import record_groups
from tests.step_records import facts


def named(one: Group, **changes: object) -> GroupFacts:
    fields = {
        "region": one.region, "producer": one.producer, "seq": one.group_index, "group_index": one.group_index,
        "attempt": one.attempt, "process": one.producer, "rollouts": len(one.rollouts),
    }  # fmt: skip
    return GroupFacts.model_validate(fields | changes)


def step_of(*groups: GroupFacts) -> StepFacts:
    return facts(groups=list(groups))


def test_groups_come_back_to_the_bit_in_the_order_of_the_facts(tmp_path: Path):
    made = [group(7, version=3), replace(group(2), answer="é\0 <b>", attempt=1, group_size=5), group(9)]
    record_groups(tmp_path, made)
    with RunReader(tmp_path) as reader:
        found = recorded_batch(reader, step_of(named(made[0]), named(made[1])))
    assert [a.identity for a in found] == [("east", "p", 7), ("east", "p", 2)]
    assert all(same(a.group, b) for a, b in zip(found, made, strict=False))


@pytest.mark.parametrize(
    ("asked", "why"),
    [({"seq": 8}, "east/p/8 is not recorded"), ({"rollouts": 3}, "east/p/7 has 2 of 3 rollouts recorded"),
     ({"group_index": 5}, "east/p/7 is recorded as group 7, and the step had group 5")],
)  # fmt: skip
def test_what_the_records_lack_is_named(tmp_path: Path, asked: dict[str, int], why: str):
    record_groups(tmp_path, [group(7)])
    with (
        RunReader(tmp_path) as reader,
        pytest.raises(StepRecordError, match=f"step 4 of epoch 1 cannot be rebuilt: {why}"),
    ):
        recorded_batch(reader, step_of(named(group(7), **asked)))


def test_a_group_that_was_recorded_twice_is_refused(tmp_path: Path):
    record_groups(tmp_path, [group(6), group(7)])
    record_groups(tmp_path, [group(7), group(8)])
    with RunReader(tmp_path) as reader, pytest.raises(StepRecordError, match="east/p/7 is recorded more than once"):
        recorded_batch(reader, step_of(named(group(7))))


def test_many_missing_groups_are_counted(tmp_path: Path):
    record_groups(tmp_path, [group(100)])
    with RunReader(tmp_path) as reader, pytest.raises(StepRecordError, match="and 3 more groups"):
        recorded_batch(reader, step_of(*(named(group(i)) for i in range(8))))
