"""The rollouts of one optimizer step, as arrays.

Invariant: a `TrainBatch` is a function of *which* groups are in it, not of the order they arrived in: rows are
sorted by (group_index, sample_index). No row has a token older than the bound it was built with. Held by
tests/unit/learner/test_batch.py.

On the way to other ranks a batch is an uncompressed `.npz` (plain arrays, no pickle).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.packing import pad_right
from anabranch.kernels.staleness import checked_age, queue_age, rollout_ages
from anabranch.schemas.errors import AnabranchError, TrajectoryError
from anabranch.schemas.trajectory import Group
from anabranch.schemas.versions import Forks, PolicyVersion


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """R rollouts of n groups; L: longest prompt + completion, C: longest completion. Padding is 0, on the right."""

    token_ids: NDArray[np.int64]  # [R, L], prompt then completion
    prompt_lengths: NDArray[np.int64]  # [R]
    lengths: NDArray[np.int64]  # [R], completion tokens
    behaviour: NDArray[np.float32]  # [R, C], log-prob recorded when the token was sampled
    ages: NDArray[np.int64]  # [R, C], updates between the sampling policy and the learner now
    queue_ages: NDArray[np.int64]  # [R], the part of the age gained between the group's last token and now
    rewards: NDArray[np.float64]  # [R]
    group: NDArray[np.int64]  # [R], 0..n−1
    group_indices: NDArray[np.int64]  # [n], ascending

    @property
    def tokens(self) -> int:
        """Completion tokens in the batch."""
        return int(self.lengths.sum())

    def completion_mask(self) -> NDArray[np.bool_]:
        """bool [R, C]."""
        return np.arange(self.behaviour.shape[1])[None, :] < self.lengths[:, None]

    def age_histogram(self) -> dict[int, int]:
        """Age -> completion tokens."""
        ages, counts = np.unique(self.ages[self.completion_mask()], return_counts=True)
        return dict(zip(ages.tolist(), counts.tolist(), strict=True))

    def mean_ages(self) -> tuple[float, float]:
        """Token-weighted mean age gained in flight (sampling -> the group's last token) and in the queue (-> now)."""
        queue = float((self.queue_ages * self.lengths).sum() / self.tokens)
        return float(self.ages[self.completion_mask()].mean()) - queue, queue

    def to_bytes(self) -> bytes:
        sink = io.BytesIO()
        np.savez(sink, **{f.name: getattr(self, f.name) for f in fields(self)})
        return sink.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> TrainBatch:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return cls(**{f.name: arrays[f.name] for f in fields(cls)})


def build_batch(groups: Sequence[Group], *, now: PolicyVersion, forks: Forks, max_age: int) -> TrainBatch:
    """Lay out `groups` for one step.

    Args:
        now: the policy the learner holds; `forks` are those of its line.
        max_age: the hard bound. Admission has applied it before; here it is only verified, because a token beyond
            it must never reach the loss.

    Raises:
        TrajectoryError: no groups, a group index twice, or a token from a policy newer than `now`.
        AnabranchError: a token older than `max_age`: the admission that let it pass is broken.
    """
    ordered = sorted(groups, key=lambda group: group.group_index)
    indices = [group.group_index for group in ordered]
    if not ordered or len(set(indices)) != len(indices):
        raise TrajectoryError(f"a batch needs distinct groups; got indices {indices}")
    for group in ordered:
        oldest = max(checked_age(policy, now, forks) for policy in group.policies)
        if oldest > max_age:
            raise AnabranchError(f"group {group.group_index} has age {oldest} at {now}; the bound is {max_age}")
    rows = [
        (position, group, rollout)
        for position, group in enumerate(ordered)
        for rollout in sorted(group.rollouts, key=lambda rollout: rollout.sample_index)
    ]
    return TrainBatch(
        token_ids=pad_right([np.concatenate([g.prompt_token_ids, r.token_ids]) for _, g, r in rows], np.int64),
        prompt_lengths=np.array([len(g.prompt_token_ids) for _, g, _ in rows], np.int64),
        lengths=np.array([len(r.token_ids) for _, _, r in rows], np.int64),
        behaviour=pad_right([r.logprobs for _, _, r in rows], np.float32),
        ages=pad_right([rollout_ages(r, now, forks) for _, _, r in rows], np.int64),
        queue_ages=np.array([queue_age(g, now, forks) for _, g, _ in rows], np.int64),
        rewards=np.array([r.reward for _, _, r in rows], np.float64),
        group=np.array([position for position, _, _ in rows], np.int64),
        group_indices=np.array(indices, np.int64),
    )
