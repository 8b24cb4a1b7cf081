"""Whose each row of a batch is: by the delivery that brought it."""

import numpy as np

from anabranch.consumers.arrivals import Arrival
from anabranch.learner.batch import build_batch
from anabranch.learner.record_order import RecordOrder
from anabranch.schemas.versions import PolicyVersion
from tests.unit.learner.conftest import NOW, make_group


def arrival(index: int, seq: int) -> Arrival:
    return Arrival("west", f"{seq}-0", "spool of west", seq, make_group(index, samples=3), 100)


def test_rows_are_those_of_the_batch_whatever_the_order_of_arrival():
    arrivals = [arrival(7, 40), arrival(2, 41)]
    batch = build_batch([a.group for a in arrivals], now=NOW, forks={}, max_age=8)
    order = RecordOrder.of(arrivals, batch, now=PolicyVersion(4, 3), forks={4: 1})
    assert [(g.group_index, g.seq, g.producer, g.process) for g in order.groups] == [
        (2, 41, "spool of west", "p"),
        (7, 40, "spool of west", "p"),
    ]
    assert [(row.group, row.sample_index) for row in order.rows] == [(g, s) for g in (0, 1) for s in (0, 1, 2)]
    assert [row.tokens for row in order.rows] == batch.lengths.tolist()
    ages = [int(batch.ages[row, : batch.lengths[row]].max()) for row in range(6)]
    assert [row.age_max for row in order.rows] == ages
    assert max(ages) > 0
    assert [order.groups[row.group].group_index for row in order.rows] == batch.group_indices[
        np.array(batch.group)
    ].tolist()


def test_it_survives_the_way_to_another_rank():
    arrivals = [arrival(0, 1)]
    batch = build_batch([a.group for a in arrivals], now=NOW, forks={}, max_age=8)
    order = RecordOrder.of(arrivals, batch, now=PolicyVersion(4, 3), forks={0: 0, 4: 1})
    assert RecordOrder.from_bytes(order.to_bytes()) == order
