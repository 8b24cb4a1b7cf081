"""The order to record a batch whose groups came from nowhere."""

from __future__ import annotations

from anabranch.learner.batch import TrainBatch
from anabranch.learner.record_order import RecordOrder, RowName
from anabranch.schemas.step_record import GroupFacts


def order_of(batch: TrainBatch, *, epoch: int = 1, version: int = 0) -> RecordOrder:
    """Each group is the delivery east/spool/INDEX; the samples of each count from 0."""
    groups, rows = [], []
    for place, index in enumerate(batch.group_indices.tolist()):
        members = [row for row in range(len(batch.lengths)) if batch.group[row] == place]
        groups.append(
            GroupFacts(
                region="east", producer="spool", seq=index, group_index=index, attempt=0, process="p",
                rollouts=len(members),
            )
        )  # fmt: skip
        for sample, row in enumerate(members):
            length = int(batch.lengths[row])
            oldest = int(batch.ages[row, :length].max())
            rows.append(RowName(group=place, sample_index=sample, tokens=length, age_max=oldest))
    return RecordOrder(epoch=epoch, version=version, forks={epoch: 0}, groups=tuple(groups), rows=tuple(rows))
