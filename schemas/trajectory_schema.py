"""What a trajectory is: the Arrow columns of a group, and the same as Python objects.

Invariant: a column keeps its name, type and meaning for as long as the major version stands; a minor version only adds
some. Held by tests/golden/test_golden.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from anabranch.schemas.versions import VersionSpan

SCHEMA_MAJOR = 1
SCHEMA_MINOR = 1
VERSION_KEY = b"anabranch.trajectory"

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
    metadata={VERSION_KEY: f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}".encode()},
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
