"""What a trajectory is: the Arrow columns of a group, and the same as Python objects.

Invariant: a column keeps its name, type and meaning for as long as the major version stands; a minor version only adds
some. Held by tests/golden/test_golden.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from anabranch.schemas.versions import PolicyVersion, VersionSpan

SCHEMA_MAJOR = 1
SCHEMA_MINOR = 2
VERSION_KEY = b"anabranch.trajectory"

SPAN = pa.struct(
    [pa.field("epoch", pa.int32(), False), pa.field("version", pa.int64(), False), pa.field("start", pa.int32(), False)]
)
SCHEMA = pa.schema(
    [
        pa.field("run", pa.string(), False),
        pa.field("region", pa.string(), False),
        pa.field("producer", pa.string(), False),  # identity of its spool: a restarted process goes on under it
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
        # Since 1.2, Unix time by the producer's clock; 0: not known, as of a producer that did not tell.
        pa.field("permit_ms", pa.int64(), False),  # the hub granted the permit
        pa.field("scored_ms", pa.int64(), False),  # this rollout's reward was there
        pa.field("spooled_ms", pa.int64(), False),  # the spool took the group
    ],
    metadata={VERSION_KEY: f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}".encode()},
)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion of a group's prompt. `token_ids` int32 [T], `logprobs` float32 [T]. Times: Unix, the producer's clock, 0 where
    it is not known."""

    sample_index: int
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    spans: tuple[VersionSpan, ...]
    reward: float
    finish_reason: str
    text: str
    started_ms: int
    finished_ms: int
    scored_ms: int = 0


class LaterRollouts(Sequence[Rollout]):
    """Rollouts of a group whose columns were judged good: `count` of them, which `make` makes when somebody first asks for one.

    What a reader wants to know of every group (`highest_token_id` of the completions and the prompt, `policies`) is known
    without them. As immutable as the tuple that it compares equal to; two threads that ask at the same time may get
    different objects of the same content.
    """

    __slots__ = ("_count", "_held", "highest_token_id", "policies")

    def __init__(
        self,
        count: int,
        make: Callable[[], tuple[Rollout, ...]],
        highest_token_id: int,
        policies: frozenset[PolicyVersion],
    ) -> None:
        self._count, self.highest_token_id, self.policies = count, highest_token_id, policies
        self._held: tuple[Rollout, ...] | Callable[[], tuple[Rollout, ...]] = make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> Rollout: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Rollout, ...]: ...
    def __getitem__(self, at: int | slice) -> Rollout | tuple[Rollout, ...]:
        return self._all()[at]

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return self._all() == tuple(other) if isinstance(other, tuple | LaterRollouts) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())

    def _all(self) -> tuple[Rollout, ...]:
        held = self._held  # once: another thread may be putting the tuple there
        if not isinstance(held, tuple):
            self._held = held = held()
        return held


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts of one prompt. `prompt_token_ids` int32 [P].

    `group_size` is how many were asked for, G; fewer are there in a partial group, which was sent at its deadline. Left out
    (0) it is as many as there are. `permit_ms` (the permit was granted) and `spooled_ms` (the spool took it): as a rollout's times.
    """

    run: str
    region: str
    producer: str
    group_index: int
    attempt: int
    prompt_token_ids: NDArray[np.int32]
    prompt_text: str
    answer: str
    rollouts: Sequence[Rollout] = ()  # immutable
    group_size: int = 0
    permit_ms: int = 0
    spooled_ms: int = 0

    def __post_init__(self) -> None:
        if not self.group_size:
            object.__setattr__(self, "group_size", len(self.rollouts))

    @property
    def partial(self) -> bool:
        return len(self.rollouts) < self.group_size

    @property
    def highest_token_id(self) -> int:
        """Of the prompt and all completions."""
        if isinstance(self.rollouts, LaterRollouts):
            return self.rollouts.highest_token_id
        return max(int(ids.max()) for ids in (self.prompt_token_ids, *(r.token_ids for r in self.rollouts)))

    @property
    def policies(self) -> frozenset[PolicyVersion]:
        """Those that sampled its tokens."""
        if isinstance(self.rollouts, LaterRollouts):
            return self.rollouts.policies
        return frozenset(span.policy for rollout in self.rollouts for span in rollout.spans)

    @property
    def rewards(self) -> NDArray[np.float64]:
        return np.array([r.reward for r in self.rollouts], dtype=np.float64)
