"""The groups of a recorded step, as the learner got them, out of the recorded trajectories.

Invariant: what comes back is the batch of the step to the bit, or an error that names what the records lack: each group that
the facts tell of, with as many rollouts, each once. Held by tests/unit/consumers/test_recorded_batch.py.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from anabranch.consumers.arrivals import Arrival
from anabranch.consumers.run_reader import RunReader
from anabranch.schemas.errors import StepRecordError
from anabranch.schemas.fates import Identity
from anabranch.schemas.step_record import GroupFacts, StepFacts
from anabranch.schemas.trajectory import Group, Rollout
from anabranch.schemas.trajectory_id import TrajectoryId
from anabranch.schemas.versions import PolicyVersion, VersionSpan

_SQL = """
SELECT t.run, t.region, t.producer, t.seq, t.entry_id, t.group_index, t.attempt, t.group_size, t.sample_index, t.prompt_token_ids,
  t.token_ids, t.logprobs, t.version_spans, t.reward, t.finish_reason, t.prompt_text, t.text, t.answer, t.started_ms, t.finished_ms,
  t.permit_ms, t.scored_ms, t.spooled_ms
FROM trajectories t
JOIN (SELECT unnest(?::VARCHAR[]) AS region, unnest(?::VARCHAR[]) AS producer, unnest(?::BIGINT[]) AS seq) g
  ON t.region = g.region AND t.producer = g.producer AND t.seq = g.seq
ORDER BY t.region, t.producer, t.seq, t.sample_index
"""
_FEW = 5  # ids that an error names


def recorded_batch(reader: RunReader, facts: StepFacts) -> list[Arrival]:
    """The deliveries of a step, in the order of `facts.groups`.

    Raises:
        StepRecordError: rollouts are missing or recorded twice.
        TemporaryError: files kept changing.
    """
    columns = zip(*(group.identity for group in facts.groups), strict=True)
    rows: dict[Identity, list[dict[str, Any]]] = defaultdict(list)
    for row in reader.rows(_SQL, [list(column) for column in columns]):
        rows[row["region"], row["producer"], row["seq"]].append(row)
    wrong = [why for group in facts.groups if (why := _what_is_wrong(group, rows[group.identity]))]
    if wrong:
        told = "; ".join(wrong[:_FEW]) + (f"; and {len(wrong) - _FEW} more groups" if len(wrong) > _FEW else "")
        raise StepRecordError(f"step {facts.step} of epoch {facts.epoch} cannot be rebuilt: {told}")
    return [_arrival(group, rows[group.identity]) for group in facts.groups]


def _what_is_wrong(group: GroupFacts, rows: list[dict[str, Any]]) -> str:
    name = TrajectoryId(*group.identity)
    samples = {row["sample_index"] for row in rows}
    if len(rows) > len(samples):
        return f"{name} is recorded more than once"
    if not rows:
        return f"{name} is not recorded (dropped for want of space, or never recorded)"
    if len(rows) != group.rollouts:
        return f"{name} has {len(rows)} of {group.rollouts} rollouts recorded"
    if {row["group_index"] for row in rows} != {group.group_index}:
        return f"{name} is recorded as group {rows[0]['group_index']}, and the step had group {group.group_index}"
    return ""


def _arrival(group: GroupFacts, rows: list[dict[str, Any]]) -> Arrival:
    first = rows[0]
    made = Group(
        run=first["run"],
        region=first["region"],
        producer=group.process,
        group_index=first["group_index"],
        attempt=first["attempt"],
        prompt_token_ids=np.array(first["prompt_token_ids"], np.int32),
        prompt_text=first["prompt_text"],
        answer=first["answer"],
        rollouts=tuple(map(_rollout, rows)),
        group_size=first["group_size"],
        permit_ms=first["permit_ms"] or 0,
        spooled_ms=first["spooled_ms"] or 0,
    )
    return Arrival(group.region, first["entry_id"] or "", group.producer, group.seq, made, 0)


def _rollout(row: dict[str, Any]) -> Rollout:
    return Rollout(
        sample_index=row["sample_index"],
        token_ids=np.array(row["token_ids"], np.int32),
        logprobs=np.array(row["logprobs"], np.float32),
        spans=tuple(VersionSpan(PolicyVersion(s["epoch"], s["version"]), s["start"]) for s in row["version_spans"]),
        reward=row["reward"],
        finish_reason=row["finish_reason"],
        text=row["text"],
        started_ms=row["started_ms"],
        finished_ms=row["finished_ms"],
        scored_ms=row["scored_ms"] or 0,
    )
