"""What one forward and backward pass works on: token rows for the model, flat tokens for the loss.

Invariant: `MicroBatch` says nothing but arrays, so it travels to the rank that works on it as an uncompressed `.npz` (plain
arrays, no pickle), and a rank holds no other rank's. Every completion token of every rollout in it stands once in `targets`,
rollouts in the order given. Held by tests/unit/learner/test_micro_batch.py.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.kernels.tokens import Tokens
from anabranch.learner.batch import TrainBatch


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """R rollouts with N completion tokens, as B rows of L positions. A pass without rollouts, which a rank with nothing to do
    takes part in all the same, has one token of weight 0 and `real` false.

    `segments`: the stretches of the rows, flattened, that attend to themselves alone (causally), and to the whole of their
    parent if they have one; no segments: every row is one.
    """

    input_ids: NDArray[np.int64]  # [B, L], padding 0
    position_ids: NDArray[np.int64]  # [B, L]
    segments: NDArray[np.int64]  # [S, 3]: start, length, number of the parent segment or −1
    predecessors: NDArray[np.int64]  # [N], in the flattened rows: where the state that predicts each token stands
    targets: NDArray[np.int64]  # [N]
    behaviour: NDArray[np.float32]  # [N]
    lags: NDArray[np.int64]  # [N]
    lengths: NDArray[np.int64]  # [R]
    advantages: NDArray[np.float32]  # [R]
    weights: NDArray[np.float32]  # [R], of each token of a rollout in the batch's loss
    rollouts: NDArray[np.int64]  # [R], rows of the batch
    real: NDArray[np.bool_]  # []

    def model_inputs(self, device: torch.device) -> tuple[Tensor, ...]:
        """`input_ids`, `position_ids`, `segments`, `predecessors`, `targets`: the arguments of `PolicyModule.forward`."""
        arrays = (self.input_ids, self.position_ids, self.segments, self.predecessors, self.targets)
        return tuple(torch.from_numpy(array).to(device) for array in arrays)

    def tokens(self, logprobs: Tensor, proximal: Tensor | None = None) -> Tokens:
        """Args: logprobs, proximal: float32 [N], in the order of `targets`; `proximal` is `logprobs` if it is not given."""

        def here(array: NDArray[np.float32] | NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(array).to(logprobs.device)

        lengths = here(self.lengths)
        return Tokens(
            ell=logprobs,
            behaviour=here(self.behaviour),
            proximal=logprobs.detach() if proximal is None else proximal,
            advantages=here(self.advantages).repeat_interleave(lengths),
            lags=here(self.lags),
            lengths=lengths,
        )


def padded(
    batch: TrainBatch, rollouts: Sequence[int], advantages: NDArray[np.float64], weights: NDArray[np.float64]
) -> MicroBatch:
    """`rollouts` (rows of `batch`) as rows padded on the right: under causal attention no real token sees what comes after
    it, so no attention mask is needed.

    Args:
        advantages, weights: float64 [all rollouts of the batch].
    """
    chosen = np.array(list(rollouts) or [0], dtype=np.int64)
    lengths, prompts = batch.lengths[chosen], batch.prompt_lengths[chosen]
    if not len(rollouts):
        lengths = np.ones_like(lengths)
    width, longest = int((lengths + prompts).max()), int(lengths.max())
    row, offset = np.nonzero(np.arange(longest)[None, :] < lengths[:, None])
    column = prompts[row] + offset
    token_ids = batch.token_ids[chosen, :width]
    return MicroBatch(
        input_ids=np.ascontiguousarray(token_ids),
        position_ids=np.broadcast_to(np.arange(width), token_ids.shape).copy(),
        segments=np.empty((0, 3), np.int64),
        predecessors=row * width + column - 1,
        targets=token_ids[row, column],
        behaviour=batch.behaviour[chosen][row, offset],
        lags=batch.ages[chosen][row, offset],
        lengths=lengths,
        advantages=advantages[chosen].astype(np.float32),
        weights=weights[chosen].astype(np.float32) if len(rollouts) else np.zeros(1, np.float32),
        rollouts=chosen,
        real=np.array(bool(len(rollouts))),
    )


def to_bytes(microbatches: Sequence[MicroBatch]) -> bytes:
    sink = io.BytesIO()
    np.savez(
        sink,
        **{f"{i}.{f.name}": getattr(micro, f.name) for i, micro in enumerate(microbatches) for f in fields(MicroBatch)},
    )
    return sink.getvalue()


def from_bytes(data: bytes) -> list[MicroBatch]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        count = len(arrays.files) // len(fields(MicroBatch))
        return [MicroBatch(**{f.name: arrays[f"{i}.{f.name}"] for f in fields(MicroBatch)}) for i in range(count)]
