"""Which positions of a packed row see which: its segments, and the plain reference of their attention.

Invariant: segments cover a row exactly once; a position sees its own segment up to itself, and the whole of the segment's
parent, which has none itself. Held by tests/unit/kernels/test_segments.py.

A rollout by itself is a segment without parent. Where rollouts share a prompt, the prompt is a segment and each completion a
child of it, so that the prompt is computed once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NO_PARENT = -1


@dataclass(frozen=True)
class Stretch:
    """A segment, and where its parent lies (length 0: it has none)."""

    start: int
    length: int
    parent_start: int = 0
    parent_length: int = 0

    @property
    def pairs(self) -> int:
        """Query-key pairs that it computes."""
        return self.length * (self.length + 1) // 2 + self.length * self.parent_length


def stretches(segments: NDArray[np.int64], length: int) -> list[Stretch]:
    """`segments` (int64 [S, 3]: start, length, number of the parent or −1) as stretches, in the order given.

    Raises:
        ValueError: they do not cover a row of `length` positions exactly once; a parent is not there or has one itself.
    """
    rows = segments.tolist()
    at = 0
    for start, size, _ in sorted(rows):
        if start != at or size < 1:
            raise ValueError(f"segments do not cover the row once: position {at} of {length}, next segment at {start}")
        at += size
    if at != length:
        raise ValueError(f"segments cover {at} of {length} positions")
    found = []
    for start, size, parent in rows:
        if parent == NO_PARENT:
            found.append(Stretch(start, size))
        elif not 0 <= parent < len(rows) or rows[parent][2] != NO_PARENT:
            raise ValueError(f"segment at {start}: its parent {parent} is not a segment without parent")
        else:
            found.append(Stretch(start, size, rows[parent][0], rows[parent][1]))
    return found


def dense_mask(segments: NDArray[np.int64], length: int) -> Tensor:
    """bool [L, L]: whether the row's position sees the column's."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for s in stretches(segments, length):
        mine = slice(s.start, s.start + s.length)
        mask[mine, mine] = torch.ones(s.length, s.length, dtype=torch.bool).tril()
        mask[mine, s.parent_start : s.parent_start + s.parent_length] = True
    return mask


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: NDArray[np.int64], *, scale: float | None = None
) -> Tensor:
    """Attention of a packed row with the mask of the whole row, [L, L]: what the fast ways are compared with.

    Args:
        query: [1, heads, L, D]; key, value: [1, key-value heads, L, D], heads a multiple of key-value heads.
        scale: of query · key; default 1/√D.

    Returns:
        [1, heads, L, D].
    """
    groups = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    weights = query @ k.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    mask = dense_mask(segments, query.shape[2]).to(query.device)
    return weights.masked_fill(~mask, -torch.inf).softmax(dim=-1) @ v
