"""Attention of a packed row by the kernels of GPUs: flex attention, and the varlen kernels of flash attention.

Invariant: both equal `segments.reference_attention`; what they are told is made from the segments, never from an [L, L].
Held by tests/unit/kernels/test_segment_kernels.py, on the CPU: flex attention uncompiled, flash attention through a stand-in
with the meaning of its arguments. `FlexPlan` and `FlashPlan` have the shape of `segment_attention.SegmentPlan`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from anabranch.kernels.segments import Stretch, stretches

FLEX_BLOCK = 128


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)


@dataclass(frozen=True, eq=False)
class FlexPlan:
    """The blocks of a row's mask that are not empty."""

    length: int
    mask: BlockMask

    @classmethod
    def of(cls, segments: NDArray[np.int64], length: int, device: torch.device | str = "cpu") -> FlexPlan:
        """Args: as `stretches`, which says what is refused."""
        found = stretches(segments, length)
        own, parent = np.empty(length, np.int32), np.empty(length, np.int32)
        for number, (s, (_, _, above)) in enumerate(zip(found, segments.tolist(), strict=True)):
            own[s.start : s.start + s.length] = number
            parent[s.start : s.start + s.length] = above
        own_, parent_ = torch.from_numpy(own).to(device), torch.from_numpy(parent).to(device)

        def sees(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return ((own_[q] == own_[k]) & (q >= k)) | (parent_[q] == own_[k])

        touched = _touched_blocks(found, length)
        counts = touched.sum(axis=1)
        # Each row's touched blocks first, in ascending order; what follows them is not read.
        indices = np.argsort(~touched, axis=1, kind="stable")
        counts_, indices_ = (torch.from_numpy(a.astype(np.int32)).to(device)[None, None] for a in (counts, indices))
        mask = BlockMask.from_kv_blocks(
            counts_, indices_, BLOCK_SIZE=FLEX_BLOCK, mask_mod=sees, seq_lengths=(length, length)
        )
        return cls(length, mask)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None, dropout: float = 0.0
    ) -> Tensor:
        """See `SegmentPlan.attend`.

        Raises:
            ValueError: with dropout, which flex attention does not have.
        """
        if dropout:
            raise ValueError("flex attention has no dropout")
        attention: Callable[..., Any] = flex_attention
        if query.device.type == "cuda":
            attention = _compiled_flex()
        grouped = query.shape[1] != key.shape[1]
        out: Tensor = attention(query, key, value, block_mask=self.mask, scale=scale, enable_gqa=grouped)
        return out


def _touched_blocks(found: list[Stretch], length: int) -> NDArray[np.bool_]:
    """bool [blocks of queries, blocks of keys]: whether a pair of the block is wanted."""
    blocks = -(-length // FLEX_BLOCK)
    touched = np.zeros((blocks, blocks), np.bool_)
    for s in found:
        first, last = s.start // FLEX_BLOCK, (s.start + s.length - 1) // FLEX_BLOCK
        for q in range(first, last + 1):
            touched[q, first : q + 1] = True
        if s.parent_length:
            top, bottom = s.parent_start // FLEX_BLOCK, (s.parent_start + s.parent_length - 1) // FLEX_BLOCK
            touched[first : last + 1, top : bottom + 1] = True
    return touched


@dataclass(frozen=True, eq=False)
class FlashPlan:
    """A row as sequences of one varlen call: queries of a segment, keys of its parent and itself."""

    length: int
    order: Tensor | None  # int64 [L], queries in order of segments; None: they are
    back: Tensor | None  # int64 [L], its inverse
    keys: Tensor | None  # int64 [K], positions of the keys of all sequences; None: each its own
    query_ends: Tensor  # int32 [S + 1]
    key_ends: Tensor  # int32 [S + 1]
    longest_queries: int
    longest_keys: int
    varlen: Callable[..., Tensor]

    @classmethod
    def of(
        cls, segments: NDArray[np.int64], length: int, device: torch.device | str, varlen: Callable[..., Tensor]
    ) -> FlashPlan:
        """Args: as `stretches`; varlen: `flash_attn.flash_attn_varlen_func` (2.1 or later)."""
        found = stretches(segments, length)
        sizes = np.array([(s.length, s.length + s.parent_length) for s in found], np.int64)
        query_ends, key_ends = np.concatenate([[[0, 0]], sizes.cumsum(axis=0)]).T
        order = np.concatenate([np.arange(s.start, s.start + s.length) for s in found])
        sorted_ = bool((order == np.arange(length)).all())
        keys = [np.arange(start, start + size) for s in found for start, size in _seen(s)]
        shared = any(s.parent_length for s in found)

        def there(array: NDArray[np.int64], dtype: type = np.int64) -> Tensor:
            return torch.from_numpy(array.astype(dtype)).to(device)

        return cls(
            length,
            None if sorted_ else there(order),
            None if sorted_ else there(np.argsort(order)),
            there(np.concatenate(keys)) if shared or not sorted_ else None,
            there(query_ends, np.int32), there(key_ends, np.int32),
            int(sizes[:, 0].max()), int(sizes[:, 1].max()), varlen,
        )  # fmt: skip

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None, dropout: float = 0.0
    ) -> Tensor:
        """See `SegmentPlan.attend`; bfloat16 or float16."""
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        if self.order is not None:
            q = q.index_select(0, self.order)
        if self.keys is not None:
            k, v = (x.index_select(0, self.keys) for x in (k, v))
        # Where a sequence has more keys than queries, its mask is causal from the end: the parent is seen as a whole.
        out = self.varlen(
            q, k, v, self.query_ends, self.key_ends, self.longest_queries, self.longest_keys,
            dropout_p=dropout, softmax_scale=scale, causal=True,
        )  # fmt: skip
        if self.back is not None:
            out = out.index_select(0, self.back)
        return out.transpose(0, 1)[None]


def _seen(s: Stretch) -> list[tuple[int, int]]:
    own = (s.start, s.length)
    return [(s.parent_start, s.parent_length), own] if s.parent_length else [own]
