"""Class and rank of the changed elements of a chunk on a GPU: the number of elements of its class before each.

Invariant: `ranks` counts every element of the chunk once, in order, so two ranks that follow each other in a class differ
by one more than the gap that kernels/delta_scan.py counts between them. Held by tests/gpu/test_delta_gpu.py.

The *directory* of old weights says how many elements of each class lie before each block of 1,024. The rank of an
element is what the directory says of its block and class, and how many elements of its class lie before it in the block;
kernels/triton_locate.py goes the other way by the same table. (Jacobson, "Space-efficient static trees and graphs", 1989,
answers both questions so for bits.) Only changed elements look at their block, so work beyond the one pass that fills the
directory goes with the changes: at 0.4 % four looks at a block of a few KiB, which the cache holds. A smaller block would
make looks cheaper and the table larger: for bf16 at 1,024 elements it is half as large as the weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.kernels.delta_chunk import MAX_CHUNK_ELEMENTS
from anabranch.kernels.delta_dtypes import BitForm
from anabranch.kernels.triton_bits import kernel, on_device_of

BLOCK = 1024
GROUP = 4  # changes that one program looks for, a row each


def class_directory(old: torch.Tensor, form: BitForm) -> torch.Tensor:
    """int32 [blocks + 1, classes]: elements of each class of `old` [n] before each block; the last row: all of them.

    n is at most MAX_CHUNK_ELEMENTS: ranks are counted within a chunk.
    """
    assert old.numel() <= MAX_CHUNK_ELEMENTS, f"{old.numel()} elements are more than a chunk may have"
    blocks, classes = triton.cdiv(old.numel(), BLOCK), form.exponent_mask + 1
    counts = torch.zeros(blocks + 1, classes, dtype=torch.int32, device=old.device)
    if blocks:
        with on_device_of(old):
            _count_classes[(blocks,)](old, old.numel(), counts[1:], *constants(form), BLOCK=BLOCK)
    return torch.cumsum(counts, 0, dtype=torch.int32)


def constants(form: BitForm) -> tuple[int, int]:
    """SHIFT and MASK of the kernels."""
    return form.exponent_shift, form.exponent_mask


@kernel
def _count_classes(
    old: tl.tensor, size: tl.tensor, counts: tl.tensor, SHIFT: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < size - block * BLOCK
    bits = tl.load(old + block * BLOCK + lane, inside, 0)
    count = tl.histogram(((bits >> SHIFT) & MASK).to(tl.int32), MASK + 1, inside)
    tl.store(counts + block * (MASK + 1) + tl.arange(0, MASK + 1), count)


def ranks(
    old: torch.Tensor, indices: torch.Tensor, directory: torch.Tensor, form: BitForm
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each of `indices` (int64 [k]) into `old` [n]: its class (uint8 [k]) and its rank (int32 [k])."""
    k = indices.numel()
    classes = torch.empty(k, dtype=torch.uint8, device=old.device)
    places = torch.empty(k, dtype=torch.int32, device=old.device)
    if k:
        with on_device_of(old):
            _rank[(triton.cdiv(k, GROUP),)](
                old, old.numel(), directory, indices, k, classes, places, *constants(form), BLOCK=BLOCK, GROUP=GROUP
            )
    return classes, places


@kernel
def _rank(
    old: tl.tensor,
    size: tl.tensor,
    directory: tl.tensor,
    indices: tl.tensor,
    k: tl.tensor,
    classes: tl.tensor,
    places: tl.tensor,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    t = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    exists = t < k
    index = tl.load(indices + t, exists, 0)
    own = ((tl.load(old + index, exists, 0) >> SHIFT) & MASK).to(tl.int32)
    block = index // BLOCK
    first = (block * BLOCK)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    bits = tl.load(
        old + first + lane, lane < size - first, 0
    )  # the whole block: a mask with any edge makes narrow loads
    same = (lane < index[:, None] - first) & (((bits >> SHIFT) & MASK).to(tl.int32) == own[:, None])
    before = tl.load(directory + block * (MASK + 1) + own, exists, 0)
    tl.store(classes + t, own.to(tl.uint8), exists)
    tl.store(places + t, before + tl.sum(same.to(tl.int32), 1), exists)
