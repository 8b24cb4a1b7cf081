"""From what a rank saw of a step to the rows of its file in the step's record. Pure.

Invariant: the files of all ranks together have each row of the batch once: rank 0 adds those that no forward pass saw, which are
the rollouts of groups without gradient and of updates that were not begun. Held by tests/unit/learner/test_step_rows.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from anabranch.learner.record_order import RecordOrder
from anabranch.learner.rollout_trace import RolloutTrace
from anabranch.learner.step import UpdateFacts
from anabranch.learner.step_observer import SeenUpdate
from anabranch.schemas.step_record import ROLLOUT_SCHEMA, TOKEN_COLUMNS

_FIGURES = ("advantage", "weight", "ratio_mean", "ratio_max", "kept_fraction", "loss_share")


def rank_rows(
    order: RecordOrder, updates: Sequence[UpdateFacts], seen: Sequence[SeenUpdate], *, first: bool, tokens: bool
) -> pa.Table:
    """The rows of one rank, `ROLLOUT_SCHEMA`, ascending.

    Args:
        updates: all of the step; `seen`: those that came to an end, of them what this rank saw.
        first: rank 0.
        tokens: with the per-token lists, else these are null.
    """
    of_row = {one.row: one for update in seen for one in update.traces}
    update_of = {index: at for at, facts in enumerate(updates) for index in facts.group_indices}
    flat = {index for facts in updates for index in facts.zero_variance_groups}
    places = sorted(of_row)
    if first:
        places = sorted(
            {*places, *(r for r in range(len(order.rows)) if _unseen(order, r, update_of, flat, len(seen)))}
        )
    rows = [_named(order, place, update_of, seen) for place in places]
    traces = [of_row.get(place) for place in places]
    columns: dict[str, pa.Array] = {}
    for field in ROLLOUT_SCHEMA:
        if field.name in TOKEN_COLUMNS:
            columns[field.name] = _lists(field, traces if tokens else [None] * len(traces))
        elif field.name in _FIGURES:
            values = [None if one is None else getattr(one, field.name) for one in traces]
            columns[field.name] = pa.array(values, field.type)
        else:
            columns[field.name] = pa.array([row[field.name] for row in rows], field.type)
    return pa.table(columns, schema=ROLLOUT_SCHEMA)


def _unseen(order: RecordOrder, row: int, update_of: dict[int, int], flat: set[int], ended: int) -> bool:
    index = order.groups[order.rows[row].group].group_index
    return index in flat or update_of[index] >= ended


def _named(order: RecordOrder, place: int, update_of: dict[int, int], seen: Sequence[SeenUpdate]) -> dict[str, Any]:
    name = order.rows[place]
    group = order.groups[name.group]
    update = update_of[group.group_index]
    return {
        "region": group.region, "producer": group.producer, "seq": group.seq, "group_index": group.group_index,
        "sample_index": name.sample_index, "row": place, "update": update,
        "applied": update < len(seen) and seen[update].result.applied,
        "tokens": name.tokens, "age_max": name.age_max,
    }  # fmt: skip


def _lists(field: pa.Field, traces: Sequence[RolloutTrace | None]) -> pa.Array:
    """A column of lists: null without a trace, or where that has none; a factor that has no value is a list of nulls."""
    parts, masks, starts, at = [], [], [], 0
    for one in traces:
        values = None if one is None else getattr(one, field.name)
        absent = one is not None and values is None and field.name == "factor"
        if one is not None and absent:
            values = np.zeros(len(one.logprob), np.float32)
        starts.append(None if values is None else at)
        if values is not None:
            parts.append(values)
            masks.append(np.full(len(values), absent))
            at += len(values)
    flat = np.concatenate(parts) if parts else np.empty(0, np.float32)
    mask = np.concatenate(masks) if masks else np.empty(0, np.bool_)
    kind = field.type.value_type
    return pa.ListArray.from_arrays(
        pa.array([*starts, at], pa.int32()), pa.array(flat, kind, mask=mask, from_pandas=False), type=field.type
    )
