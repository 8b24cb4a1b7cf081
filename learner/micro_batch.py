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

from anabranch.kernels.segments import NO_PARENT
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
        """`input_ids`, `position_ids`, `segments`, `predecessors`, `targets`: the arguments of `PolicyModule.forward`.
        The segments stay on the CPU: calls are planned from them."""
        ids, positions, predecessors, targets = (
            torch.from_numpy(array).to(device)
            for array in (self.input_ids, self.position_ids, self.predecessors, self.targets)
        )
        return ids, positions, torch.from_numpy(self.segments), predecessors, targets

    def tokens(self, logprobs: Tensor, proximal: Tensor | None = None, selected: Tensor | None = None) -> Tokens:
        """Args: logprobs, proximal: float32 [N], selected: bool [N], in the order of `targets`; `proximal` is `logprobs` if it
        is not given."""

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
            selected=selected,
        )


def padded(
    batch: TrainBatch, rollouts: Sequence[int], advantages: NDArray[np.float64], weights: NDArray[np.float64]
) -> MicroBatch:
    """`rollouts` (rows of `batch`) as rows padded on the right: under causal attention no real token sees what comes after
    it, so no attention mask is needed.

    Args:
        advantages, weights: float64 [all rollouts of the batch].
    """
    chosen, lengths = _chosen(batch, rollouts)
    prompts = batch.prompt_lengths[chosen]
    width = int((lengths + prompts).max())
    token_ids = batch.token_ids[chosen, :width]
    row, offset = np.nonzero(np.arange(int(lengths.max()))[None, :] < lengths[:, None])
    return _micro_batch(
        batch, chosen, lengths, advantages, weights,
        real=bool(len(rollouts)),
        input_ids=np.ascontiguousarray(token_ids),
        position_ids=np.broadcast_to(np.arange(width), token_ids.shape).copy(),
        segments=np.empty((0, 3), np.int64),
        predecessors=row * width + prompts[row] + offset - 1,
    )  # fmt: skip


def packed(
    batch: TrainBatch,
    rollouts: Sequence[int],
    advantages: NDArray[np.float64],
    weights: NDArray[np.float64],
    *,
    share_prompts: bool,
) -> MicroBatch:
    """`rollouts` (rows of `batch`) one after the other in one row. The last token of each predicts nothing and is left out.

    Args:
        advantages, weights: float64 [all rollouts of the batch].
        share_prompts: rollouts of one group stand after one prompt, their parent segment.
    """
    chosen, lengths = _chosen(batch, rollouts)
    prompts = batch.prompt_lengths[chosen]
    ids, places, segments, predecessors = [], [], [], []
    at, parent, parent_end, group = 0, NO_PARENT, 0, -1
    alone = np.bincount(batch.group[chosen])[batch.group[chosen]] == 1

    def put(row: int, start: int, stop: int, above: int) -> None:
        nonlocal at
        if stop > start:
            segments.append((at, stop - start, above))
            ids.append(batch.token_ids[row, start:stop])
            places.append(np.arange(start, stop))
            at += stop - start

    for i, row in enumerate(chosen.tolist()):
        prompt, length = int(prompts[i]), int(lengths[i])
        if share_prompts and not alone[i]:
            if group != batch.group[row]:
                group, parent = int(batch.group[row]), len(segments)
                put(row, 0, prompt, NO_PARENT)
                parent_end = at
            predecessors.append([parent_end - 1])
            predecessors.append(np.arange(at, at + length - 1))
            put(row, prompt, prompt + length - 1, parent)
        else:
            predecessors.append(np.arange(at + prompt - 1, at + prompt + length - 1))
            put(row, 0, prompt + length - 1, NO_PARENT)
    return _micro_batch(
        batch, chosen, lengths, advantages, weights,
        real=bool(len(rollouts)),
        input_ids=np.concatenate(ids)[None],
        position_ids=np.concatenate(places)[None],
        segments=np.array(segments, np.int64),
        predecessors=np.concatenate(predecessors).astype(np.int64),
    )  # fmt: skip


def _chosen(batch: TrainBatch, rollouts: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of the batch and how many of their completion tokens count: one of the first rollout, if there is none."""
    chosen = np.array(list(rollouts) or [0], dtype=np.int64)
    return chosen, batch.lengths[chosen] if len(rollouts) else np.ones(1, np.int64)


def _micro_batch(
    batch: TrainBatch,
    chosen: NDArray[np.int64],
    lengths: NDArray[np.int64],
    advantages: NDArray[np.float64],
    weights: NDArray[np.float64],
    *,
    real: bool,
    input_ids: NDArray[np.int64],
    position_ids: NDArray[np.int64],
    segments: NDArray[np.int64],
    predecessors: NDArray[np.int64],
) -> MicroBatch:
    """What does not depend on how rows are laid out."""
    row, offset = np.nonzero(np.arange(int(lengths.max()))[None, :] < lengths[:, None])
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        segments=segments,
        predecessors=predecessors,
        targets=batch.token_ids[chosen][row, batch.prompt_lengths[chosen][row] + offset],
        behaviour=batch.behaviour[chosen][row, offset],
        lags=batch.ages[chosen][row, offset],
        lengths=lengths,
        advantages=advantages[chosen].astype(np.float32),
        weights=weights[chosen].astype(np.float32) if real else np.zeros(1, np.float32),
        rollouts=chosen,
        real=np.array(real),
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
