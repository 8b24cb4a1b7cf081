"""The rows of a rank's file: every row of the batch once over all ranks, whatever the step came to."""

import numpy as np
import pyarrow as pa
import pytest

from anabranch.learner.rollout_trace import RolloutTrace
from anabranch.learner.step import UpdateFacts
from anabranch.learner.step_observer import SeenUpdate
from anabranch.learner.step_rows import rank_rows
from anabranch.schemas.step_record import ROLLOUT_SCHEMA, UpdateResult
from tests.record_orders import order_of
from tests.unit.learner.conftest import make_batch

BATCH = make_batch(range(3), samples=2)  # rows 0..5; the second group is without gradient
ORDER = order_of(BATCH)
UPDATES = [UpdateFacts((0, 1), (1,), 1.0), UpdateFacts((2,), (), 1.0)]


def traced(row: int, *, factor: bool = True, proximal: bool = False) -> RolloutTrace:
    length = int(BATCH.lengths[row])
    values = np.arange(length, dtype=np.float32) - length
    return RolloutTrace(
        row, 0.5, 0.25, 1.0, 2.0, 0.5, -0.125, values, values - 1 if proximal else None, values * 0,
        values + 1 if factor else None, values < -1,
    )  # fmt: skip


def seen(*traces: RolloutTrace, applied: bool = True) -> SeenUpdate:
    return SeenUpdate(list(traces), UpdateResult.of(0.1, 1.0, applied=applied), ())


def test_ranks_have_each_row_once_and_rank_0_those_that_nobody_saw():
    first = rank_rows(ORDER, UPDATES, [seen(traced(0)), seen(traced(5))], first=True, tokens=True)
    other = rank_rows(ORDER, UPDATES, [seen(traced(1)), seen(traced(4))], first=False, tokens=True)
    assert first.schema.equals(ROLLOUT_SCHEMA, check_metadata=True)
    assert first["row"].to_pylist() == [0, 2, 3, 5]
    assert other["row"].to_pylist() == [1, 4]
    assert first["update"].to_pylist() == [0, 0, 0, 1]
    flat = first.slice(1, 1).to_pylist()[0]
    assert (flat["group_index"], flat["sample_index"], flat["seq"]) == (1, 0, 1)
    assert flat["tokens"] == BATCH.lengths[2]
    assert [flat[name] for name in ("advantage", "weight", "loss_share", "logprob", "factor", "kept")] == [None] * 6


def test_values_are_those_that_were_seen_bit_for_bit():
    table = rank_rows(
        ORDER, UPDATES, [seen(traced(0, proximal=True)), seen(traced(5, factor=False))], first=True, tokens=True
    )
    rows = {row["row"]: row for row in table.to_pylist()}
    one = traced(0, proximal=True)
    assert np.array_equal(np.array(rows[0]["logprob"], np.float32), one.logprob)
    assert np.array_equal(np.array(rows[0]["proximal"], np.float32), one.proximal)
    assert rows[0]["kept"] == one.kept.tolist()
    assert rows[5]["proximal"] is None
    assert rows[5]["factor"] == [None] * int(BATCH.lengths[5])
    assert (rows[0]["ratio_max"], rows[0]["loss_share"]) == (2.0, -0.125)


def test_nan_stays_nan():
    one = traced(0)
    one.logprob[0] = np.nan
    table = rank_rows(ORDER, UPDATES, [seen(one), seen()], first=False, tokens=True)
    assert np.isnan(table["logprob"].to_pylist()[0][0])


def test_a_refused_update_is_there_and_those_after_it_are_rows_that_nobody_saw():
    table = rank_rows(ORDER, UPDATES, [seen(traced(0), traced(1), applied=False)], first=True, tokens=True)
    rows = table.to_pylist()
    assert [row["row"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert not any(row["applied"] for row in rows)
    assert [row["advantage"] is None for row in rows] == [False, False, True, True, True, True]


@pytest.mark.parametrize("name", ["logprob", "proximal", "entropy", "factor", "kept"])
def test_lists_can_be_left_out(name):
    table = rank_rows(ORDER, UPDATES, [seen(traced(0)), seen()], first=True, tokens=False)
    assert table[name].null_count == len(table)
    assert pa.types.is_list(table[name].type)
