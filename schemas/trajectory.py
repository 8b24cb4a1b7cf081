"""The trajectory schema: one Arrow record batch per group, one row per rollout.

Invariant: a `Group` that `decode_group` returns is well formed. Every rollout has at least one token, one
log-prob per token, spans that start at 0 and ascend inside the completion, and finite numbers; NaN log-probs
or rewards are refused here, at ingest, and never reach the loss. Held by tests/unit/schemas/test_trajectory.py.

Version rule: the schema's metadata carries `major.minor`. A reader takes any minor of its own major (added
columns are ignored) and refuses another major by name. 1.1 added `group_size`; a batch of 1.0 holds whole groups.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from anabranch.schemas.errors import SchemaVersionError, TrajectoryError
from anabranch.schemas.versions import PolicyVersion, VersionSpan

SCHEMA_MAJOR = 1
SCHEMA_MINOR = 1
_VERSION_KEY = b"anabranch.trajectory"

SPAN = pa.struct(
    [pa.field("epoch", pa.int32(), False), pa.field("version", pa.int64(), False), pa.field("start", pa.int32(), False)]
)
SCHEMA = pa.schema(
    [
        pa.field("run", pa.string(), False),
        pa.field("region", pa.string(), False),
        pa.field("producer", pa.string(), False),  # producer id, unique per process start
        pa.field("group_index", pa.int64(), False),  # position in the run's prompt order; names prompt and seed
        pa.field("sample_index", pa.int32(), False),  # 0..G-1 inside the group
        pa.field("attempt", pa.int32(), False),  # 0 the first time this group index was handed out
        pa.field("prompt_token_ids", pa.list_(pa.int32()), False),
        pa.field("token_ids", pa.list_(pa.int32()), False),  # what the model wrote, end-of-sequence included
        pa.field("logprobs", pa.list_(pa.float32()), False),  # processed, at the sampling temperature
        pa.field("version_spans", pa.list_(SPAN), False),  # which policy version sampled each token
        pa.field("reward", pa.float64(), False),
        pa.field("finish_reason", pa.string(), False),  # "stop" or "length"
        pa.field("prompt_text", pa.string(), False),
        pa.field("text", pa.string(), False),
        pa.field("answer", pa.string(), False),  # the gold answer
        pa.field("started_ms", pa.int64(), False),  # Unix time, the producer's clock
        pa.field("finished_ms", pa.int64(), False),
        pa.field("group_size", pa.int32(), False),  # G: rollouts asked for, at least as many as there are rows
    ],
    metadata={_VERSION_KEY: f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}".encode()},
)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion of a group's prompt. `token_ids` int32 [T], `logprobs` float32 [T]."""

    sample_index: int
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    spans: tuple[VersionSpan, ...]
    reward: float
    finish_reason: str
    text: str
    started_ms: int
    finished_ms: int


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts of one prompt. `prompt_token_ids` int32 [P].

    `group_size` is how many were asked for, G; fewer are there in a partial group, which was sent at its deadline. Left out
    (0) it is as many as there are.
    """

    run: str
    region: str
    producer: str
    group_index: int
    attempt: int
    prompt_token_ids: NDArray[np.int32]
    prompt_text: str
    answer: str
    rollouts: tuple[Rollout, ...] = field(default_factory=tuple)
    group_size: int = 0

    def __post_init__(self) -> None:
        if not self.group_size:
            object.__setattr__(self, "group_size", len(self.rollouts))

    @property
    def partial(self) -> bool:
        return len(self.rollouts) < self.group_size

    @property
    def rewards(self) -> NDArray[np.float64]:
        return np.array([r.reward for r in self.rollouts], dtype=np.float64)


def encode_group(group: Group) -> bytes:
    """`group` as one Arrow IPC stream with a single record batch. Raises TrajectoryError if it is not well formed."""
    for rollout in group.rollouts:
        _check(group, rollout)
    if not group.rollouts:
        raise TrajectoryError(f"group {group.group_index} has no rollouts")
    _check_size(group.group_index, group.group_size, len(group.rollouts))
    n = len(group.rollouts)
    rows = group.rollouts
    batch = pa.record_batch(
        [
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
        ],
        schema=SCHEMA,
    )  # fmt: skip
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def read_batch(payload: bytes | memoryview) -> pa.RecordBatch:
    """The record batch inside `payload`, without copying its buffers.

    Raises:
        SchemaVersionError: another major version.
        TrajectoryError: not an Arrow stream of exactly one batch with the columns of `SCHEMA`.
    """
    try:
        with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
            version = (reader.schema.metadata or {}).get(_VERSION_KEY, b"none").decode("ascii", "replace")
            major, _, minor = version.partition(".")
            if major != str(SCHEMA_MAJOR):
                raise SchemaVersionError(
                    f"trajectory schema version {version}; this program reads {SCHEMA_MAJOR}.x: upgrade the older side"
                )
            batches = list(reader)
        if len(batches) != 1:
            raise TrajectoryError(f"an entry holds {len(batches)} record batches; expected 1")
        batch = batches[0]
        if minor == "0" and "group_size" not in batch.schema.names:  # before 1.1 every group was whole
            whole = np.full(batch.num_rows, batch.num_rows, np.int32)
            batch = batch.append_column(SCHEMA.field("group_size"), pa.array(whole))
        batch = batch.select(SCHEMA.names)
        batch.validate(full=True)
    except (pa.ArrowException, KeyError, OSError) as error:
        raise TrajectoryError(f"payload is not a trajectory batch: {error}") from error
    for ours, theirs in zip(SCHEMA, batch.schema, strict=True):
        if ours.type != theirs.type:
            raise TrajectoryError(f"column {ours.name} has type {theirs.type}; expected {ours.type}")
    if batch.num_rows == 0 or any(_has_nulls(column) for column in batch.columns):
        raise TrajectoryError("a trajectory batch has no rows, or nulls in it")
    return batch


def _has_nulls(column: pa.Array) -> bool:
    """Whether there are nulls in `column` or, for a nested type, inside its values."""
    if column.null_count:
        return True
    if pa.types.is_nested(column.type):
        inner = column.flatten()
        return any(map(_has_nulls, inner if isinstance(inner, list) else [inner]))
    return False


def decode_group(payload: bytes | memoryview) -> Group:
    """The `Group` in `payload`, validated; arrays are read-only views into it.

    Raises:
        SchemaVersionError, TrajectoryError: as `read_batch`, or a rollout that is not well formed.
    """
    batch = read_batch(payload)
    column = {name: batch.column(i) for i, name in enumerate(SCHEMA.names)}
    n = batch.num_rows
    for name in ("run", "region", "producer", "group_index", "attempt", "prompt_text", "answer", "group_size"):
        if n > 1 and len(column[name].unique()) != 1:
            raise TrajectoryError(f"one entry mixes several values of {name}")
    prompts = column["prompt_token_ids"]
    if any(prompts[i] != prompts[0] for i in range(1, n)):
        raise TrajectoryError("one entry mixes several values of prompt_token_ids")
    plain = {k: column[k].to_pylist() for k in SCHEMA.names if k not in ("prompt_token_ids", "token_ids", "logprobs")}
    _check_size(plain["group_index"][0], plain["group_size"][0], n)
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
                started_ms=plain["started_ms"][i], finished_ms=plain["finished_ms"][i],
            )
            for i in range(n)
        ),
        group_size=plain["group_size"][0],
    )  # fmt: skip
    for rollout in group.rollouts:
        _check(group, rollout)
    if len({r.sample_index for r in group.rollouts}) != n:
        raise TrajectoryError(f"group {group.group_index} repeats a sample index")
    return group


def _check_size(group_index: int, group_size: int, rollouts: int) -> None:
    if group_size < rollouts:
        raise TrajectoryError(f"group {group_index}: {rollouts} rollouts of a group of {group_size}")


def _check(group: Group, rollout: Rollout) -> None:
    where = f"group {group.group_index} sample {rollout.sample_index} of producer {group.producer}"
    tokens = len(rollout.token_ids)
    if tokens == 0 or len(group.prompt_token_ids) == 0:
        raise TrajectoryError(f"{where}: empty prompt or completion")
    lowest_id = min(int(np.min(group.prompt_token_ids)), int(np.min(rollout.token_ids)))
    if min(lowest_id, group.group_index, rollout.sample_index) < 0:
        raise TrajectoryError(f"{where}: a negative token id or index")
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
