"""The trajectory codec as plainly as it can be said, one rollout after the other.

`trajectory_codec` does the same over whole columns, and comes back here for the name of what it finds wrong. Invariant:
both agree on every group, down to the bytes and the words of an error. Held by
tests/property/test_trajectory_codec.py.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pyarrow as pa

from anabranch.schemas.errors import TrajectoryError
from anabranch.schemas.trajectory_schema import SCHEMA, SPAN, Group, Rollout
from anabranch.schemas.versions import PolicyVersion, VersionSpan

_OF_A_GROUP = (
    "run", "region", "producer", "group_index", "attempt", "prompt_text", "answer", "group_size", "permit_ms", "spooled_ms",
)  # fmt: skip


def encode_slowly(group: Group) -> bytes:
    """As `trajectory_codec.encode_group`."""
    for rollout in group.rollouts:
        check_rollout(group, rollout)
    if not group.rollouts:
        raise TrajectoryError(f"group {group.group_index} has no rollouts")
    check_size(group.group_index, group.group_size, len(group.rollouts))
    try:
        columns = columns_of(group)
        batch = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
    except (pa.ArrowException, AttributeError, OverflowError, TypeError, ValueError) as error:
        raise TrajectoryError(f"group {group.group_index}: a value does not fit its column: {error}") from error
    if any(column.null_count for column in columns):
        raise TrajectoryError(f"group {group.group_index}: a value is missing")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def columns_of(group: Group) -> list[pa.Array]:
    """In the order of `SCHEMA`, unchecked."""
    n = len(group.rollouts)
    rows = group.rollouts
    return [
        pa.array([group.run] * n), pa.array([group.region] * n), pa.array([group.producer] * n),
        pa.array([group.group_index] * n, pa.int64()),
        pa.array([r.sample_index for r in rows], pa.int32()),
        pa.array([group.attempt] * n, pa.int32()),
        pa.array([group.prompt_token_ids] * n, pa.list_(pa.int32())),
        pa.array([r.token_ids for r in rows], pa.list_(pa.int32())),
        pa.array([r.logprobs for r in rows], pa.list_(pa.float32())),
        pa.array(
            [[{"epoch": s.policy.epoch, "version": s.policy.version, "start": s.start} for s in r.spans] for r in rows],
            pa.list_(SPAN),
        ),
        pa.array([r.reward for r in rows], pa.float64()),
        pa.array([r.finish_reason for r in rows]),
        pa.array([group.prompt_text] * n), pa.array([r.text for r in rows]), pa.array([group.answer] * n),
        pa.array([r.started_ms for r in rows], pa.int64()), pa.array([r.finished_ms for r in rows], pa.int64()),
        pa.array([group.group_size] * n, pa.int32()),
        pa.array([group.permit_ms] * n, pa.int64()), pa.array([r.scored_ms for r in rows], pa.int64()),
        pa.array([group.spooled_ms] * n, pa.int64()),
    ]  # fmt: skip


def group_of_batch(batch: pa.RecordBatch) -> Group:
    """The `Group` in a batch with the columns of `SCHEMA`; arrays are views into its buffers.

    Raises TrajectoryError: a rollout that is not well formed, or rows that are not of one group.
    """
    column = {name: batch.column(i) for i, name in enumerate(SCHEMA.names)}
    n = batch.num_rows
    for name in _OF_A_GROUP:
        if n > 1 and len(column[name].unique()) != 1:
            raise TrajectoryError(f"one entry mixes several values of {name}")
    prompts = column["prompt_token_ids"]
    if any(prompts[i] != prompts[0] for i in range(1, n)):
        raise TrajectoryError("one entry mixes several values of prompt_token_ids")
    plain = {k: column[k].to_pylist() for k in SCHEMA.names if k not in ("prompt_token_ids", "token_ids", "logprobs")}
    check_size(plain["group_index"][0], plain["group_size"][0], n)
    group = Group(
        run=plain["run"][0], region=plain["region"][0], producer=plain["producer"][0],
        group_index=plain["group_index"][0], attempt=plain["attempt"][0],
        prompt_token_ids=prompts[0].values.to_numpy(),
        prompt_text=plain["prompt_text"][0], answer=plain["answer"][0],
        rollouts=tuple(
            Rollout(
                sample_index=plain["sample_index"][i],
                token_ids=column["token_ids"][i].values.to_numpy(),
                logprobs=column["logprobs"][i].values.to_numpy(),
                spans=tuple(VersionSpan(PolicyVersion(s["epoch"], s["version"]), s["start"]) for s in plain["version_spans"][i]),
                reward=plain["reward"][i], finish_reason=plain["finish_reason"][i], text=plain["text"][i],
                started_ms=plain["started_ms"][i], finished_ms=plain["finished_ms"][i], scored_ms=plain["scored_ms"][i],
            )
            for i in range(n)
        ),
        group_size=plain["group_size"][0], permit_ms=plain["permit_ms"][0], spooled_ms=plain["spooled_ms"][0],
    )  # fmt: skip
    for rollout in group.rollouts:
        check_rollout(group, rollout)
    if len({r.sample_index for r in group.rollouts}) != n:
        raise TrajectoryError(f"group {group.group_index} repeats a sample index")
    return group


def check_size(group_index: int, group_size: int, rollouts: int) -> None:
    if group_size < rollouts:
        raise TrajectoryError(f"group {group_index}: {rollouts} rollouts of a group of {group_size}")


def check_rollout(group: Group, rollout: Rollout) -> None:
    where = f"group {group.group_index} sample {rollout.sample_index} of producer {group.producer}"
    tokens = len(rollout.token_ids)
    if tokens == 0 or len(group.prompt_token_ids) == 0:
        raise TrajectoryError(f"{where}: empty prompt or completion")
    lowest_id = min(int(np.min(group.prompt_token_ids)), int(np.min(rollout.token_ids)))
    if min(lowest_id, group.group_index, group.attempt, rollout.sample_index) < 0:
        raise TrajectoryError(f"{where}: a negative token id, index or attempt")
    if len(rollout.logprobs) != tokens:
        raise TrajectoryError(f"{where}: {tokens} tokens but {len(rollout.logprobs)} log-probs")
    if not np.isfinite(rollout.logprobs).all() or (np.asarray(rollout.logprobs) > 1e-3).any():
        raise TrajectoryError(f"{where}: a log-prob is not finite or is above 0")
    if not math.isfinite(rollout.reward):
        raise TrajectoryError(f"{where}: the reward is {rollout.reward}")
    if any(s.policy.epoch < 0 or s.policy.version < 0 for s in rollout.spans):
        raise TrajectoryError(f"{where}: a negative policy version")
    starts = [s.start for s in rollout.spans]
    ordered = all(a < b for a, b in itertools.pairwise(starts))
    if not starts or starts[0] != 0 or not ordered or starts[-1] >= tokens:
        raise TrajectoryError(f"{where}: version spans start at {starts} for {tokens} tokens")
