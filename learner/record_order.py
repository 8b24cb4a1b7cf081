"""What every rank has to know of a step's batch to record its part of it: whose each row is.

Invariant: what `from_bytes` makes of `to_bytes` is equal to it; rows are in the order of the batch. Held by
tests/unit/learner/test_record_order.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from pydantic import BaseModel, ConfigDict

from anabranch.consumers.arrivals import Arrival
from anabranch.learner.batch import TrainBatch
from anabranch.schemas.step_record import GroupFacts
from anabranch.schemas.versions import PolicyVersion


class RowName(BaseModel):
    """A rollout of the batch. `group` is a place in `RecordOrder.groups`."""

    model_config = ConfigDict(frozen=True)
    group: int
    sample_index: int
    tokens: int
    age_max: int


class RecordOrder(BaseModel):
    """`epoch`, `version`: the policy that the step begins with; `groups` and `rows` in the order of the batch."""

    model_config = ConfigDict(frozen=True)
    epoch: int
    version: int
    forks: dict[int, int]
    groups: tuple[GroupFacts, ...]
    rows: tuple[RowName, ...]

    @classmethod
    def of(
        cls, arrivals: Sequence[Arrival], batch: TrainBatch, *, now: PolicyVersion, forks: Mapping[int, int]
    ) -> Self:
        """`batch` is `build_batch` of the arrivals' groups."""
        ordered = sorted(arrivals, key=lambda arrival: arrival.group.group_index)
        samples = [sorted(rollout.sample_index for rollout in a.group.rollouts) for a in ordered]
        places = [(group, sample) for group, of_group in enumerate(samples) for sample in of_group]
        lengths = batch.lengths.tolist()
        return cls(
            epoch=now.epoch,
            version=now.version,
            forks=dict(forks),
            groups=tuple(
                GroupFacts(
                    region=a.region, producer=a.producer, seq=a.seq, group_index=a.group.group_index,
                    attempt=a.group.attempt, process=a.group.producer, rollouts=len(of_group),
                )
                for a, of_group in zip(ordered, samples, strict=True)
            ),
            rows=tuple(
                RowName(
                    group=group, sample_index=sample, tokens=lengths[row],
                    age_max=int(batch.ages[row, : lengths[row]].max()),
                )
                for row, (group, sample) in enumerate(places)
            ),
        )  # fmt: skip

    def to_bytes(self) -> bytes:
        return self.model_dump_json().encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        return cls.model_validate_json(data)
