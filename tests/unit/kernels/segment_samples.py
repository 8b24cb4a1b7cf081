"""Packed rows for the tests of their attention: segments, and queries, keys and values for them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from anabranch.kernels.segments import NO_PARENT


def row(*parts: int | tuple[int, list[int]]) -> tuple[NDArray[np.int64], int]:
    """Segments of a row and its length: a number is a segment by itself, (parent, children) a shared one."""
    segments: list[list[int]] = []
    at = 0
    for part in parts:
        parent, children = part if isinstance(part, tuple) else (part, [])
        number = len(segments)
        segments.append([at, parent, NO_PARENT])
        at += parent
        for child in children:
            segments.append([at, child, number])
            at += child
    return np.array(segments, np.int64), at


def qkv(
    length: int, *, heads: int = 4, kv_heads: int = 2, width: int = 8, dtype: torch.dtype = torch.float64, seed: int = 0
):
    g = torch.Generator().manual_seed(seed)
    # As a model makes them: transposed views of [1, L, heads, D].
    return tuple(
        torch.randn(1, length, h, width, generator=g, dtype=dtype).transpose(1, 2).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    )


def gradients(out: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(1)
    weights = torch.randn(out.shape, generator=g, dtype=out.dtype)
    return torch.autograd.grad((out * weights).sum(), inputs)


ROWS = {
    "one": row(7),
    "apart": row(5, 1, 9, 9, 2),
    "shared": row((6, [4, 4, 4])),
    "shared, of all lengths": row((3, [1, 5, 2]), (8, [7]), 4, (1, [1, 1])),
    "long": row((150, [40, 3, 70]), 130, (20, [9])),
}

PARTS = st.lists(
    st.one_of(st.integers(1, 12), st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=4))),
    min_size=1, max_size=5,
)  # fmt: skip
