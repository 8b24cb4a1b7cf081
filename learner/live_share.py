"""The present bits of a rank's share, read from live parameters without gathering the model.

Invariant: `copy_to` over all ranks gives what `PublishedWeights.bits` gives, bit for bit. Parameters that all ranks hold
(ZeRO 0 to 2, float32 masters too, which are rounded on the way) are shared out evenly; of a parameter that ZeRO-3 has
partitioned a rank reads the part it holds. What transformers converts on save (fused experts) belongs whole to one
rank: under ZeRO-3 such parameters are gathered, one conversion at a time. Held by tests/unit/learner/test_shares.py and
tests/e2e/test_learner_engine.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anabranch.kernels.delta_chunk import Piece
from anabranch.kernels.delta_dtypes import Bits
from anabranch.learner.conversions import CheckpointNames, Conversion, revert
from anabranch.learner.quiet import without_deprecations
from anabranch.learner.shares import ShareImage, Whole, in_order, partition, split_evenly
from anabranch.schemas.layout import Layout

TORCH = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
SIGNED = {"bf16": np.int16, "f16": np.int16, "f32": np.int32}


class LiveShare:
    """Made after DeepSpeed has taken the model over. `live`: parameters by their own names."""

    def __init__(
        self,
        lm: Any,
        layout: Layout,
        names: CheckpointNames,
        live: Mapping[str, Tensor],
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.layout, self.rank, self.world_size = layout, rank, world_size
        self._lm, self._live, self._names = lm, live, names
        index = {spec.name: i for i, spec in enumerate(layout.tensors)}
        parts = {index[n]: live[p].ds_tensor for n, p in names.plain.items() if hasattr(live[p], "ds_id")}
        wholes = [Whole(tuple(index[t] for t in c.targets)) for c in names.conversions]
        replicated = [index[name] for name in names.plain if index[name] not in parts]
        own = split_evenly(layout, replicated, wholes, world_size)[rank]
        for tensor, part in parts.items():
            own += partition(layout, tensor, rank, part.numel())
        self.pieces: tuple[Piece, ...] = tuple(in_order(own))
        self._pieces = {layout.tensors[p.tensor].name: p for p in self.pieces}

    def image(self, *, pinned: bool = False) -> ShareImage:
        """Room for this share; with `pinned` page-locked, where the weights live on a GPU."""
        return ShareImage(self.layout, self.pieces, pinned=pinned and self._on_gpu())

    @torch.no_grad()
    def copy_to(self, image: ShareImage) -> None:
        """Read the present bits into `image`. Collective if a conversion's parameters are partitioned."""
        for name, parameter in self._names.plain.items():
            piece = self._pieces.get(name)
            if piece is not None:
                _copy(self._elements(parameter, piece), image.bits(piece), self._dtype(piece))
        for conversion in self._names.conversions:
            self._convert(conversion, image)
        if self._on_gpu():
            torch.cuda.current_stream().synchronize()

    def _elements(self, parameter: str, piece: Piece) -> Tensor:
        live: Any = self._live[parameter]
        if hasattr(live, "ds_id"):
            part: Tensor = live.ds_tensor.detach()
            return part.reshape(-1)[: piece.size]
        flat: Tensor = live.detach().reshape(-1)
        return flat[piece.start : piece.stop]

    def _convert(self, conversion: Conversion, image: ShareImage) -> None:
        mine = any(target in self._pieces for target in conversion.targets)
        sources: dict[str, Any] = {name: self._live[name] for name in conversion.sources}
        with _gathered([t for t in sources.values() if hasattr(t, "ds_id")]):
            if mine:
                # A copy on the CPU: what comes out may be views of it, which outlive the gathering.
                whole = {name: t.detach().to("cpu", copy=True) for name, t in sources.items()}
        if not mine:
            return
        made = revert(self._lm, whole)
        for target in conversion.targets:
            piece = self._pieces.get(target)
            if piece is not None:
                _copy(made[target].reshape(-1), image.bits(piece), self._dtype(piece))

    def _dtype(self, piece: Piece) -> str:
        return self.layout.tensors[piece.tensor].dtype

    def _on_gpu(self) -> bool:
        return any(t.is_cuda or getattr(getattr(t, "ds_tensor", None), "is_cuda", False) for t in self._live.values())


def _copy(source: Tensor, bits: Bits, dtype: str) -> None:
    """The elements of `source` into `bits`, rounded to `dtype`."""
    torch.from_numpy(bits.view(SIGNED[dtype])).view(TORCH[dtype]).copy_(source, non_blocking=True)


@contextlib.contextmanager
def _gathered(parameters: Sequence[Any]) -> Iterator[None]:
    if not parameters:
        yield
        return
    import deepspeed

    with without_deprecations(), deepspeed.zero.GatheredParameters(list(parameters)):
        yield
