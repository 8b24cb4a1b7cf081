"""Where the changes of a chunk lie, on a GPU: from class and rank to the element, as kernels/delta_locate.py.

Invariant: over the same old bits `select` finds exactly the elements from which kernels/triton_ranks.py took the ranks.
Held by tests/gpu/test_delta_gpu.py.

Each change goes to its element: by binary search over its class's column of the directory to the block, then by one
running count over the block. The other way round, every element would have to know its rank to ask whether it is among
the changed ones: a sort of each block, for one change in 250 elements. Here nothing but the directory is made for all
elements, and the work goes with the changes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.kernels.delta_dtypes import BitForm
from anabranch.kernels.triton_bits import kernel, on_device_of
from anabranch.kernels.triton_ranks import BLOCK, GROUP, constants

SEARCHES = 128  # changes that one program of the search is for


def select(
    old: torch.Tensor, classes: torch.Tensor, places: torch.Tensor, directory: torch.Tensor, form: BitForm
) -> torch.Tensor:
    """The element of `old` [n] that has class `classes` (uint8 [k]) and rank `places` (int32 [k]), for each: int64 [k].
    Every rank is below the number of elements of its class."""
    k = places.numel()
    blocks = torch.empty(k, dtype=torch.int32, device=old.device)
    indices = torch.empty(k, dtype=torch.int64, device=old.device)
    if k:
        last = directory.shape[0] - 1
        with on_device_of(old):
            _find_block[(triton.cdiv(k, SEARCHES),)](
                directory, last, last.bit_length(), classes, places, k, blocks, form.exponent_mask, SEARCHES=SEARCHES
            )
            _find_element[(triton.cdiv(k, GROUP),)](
                old, old.numel(), directory, classes, places, blocks, k, indices, *constants(form), BLOCK, GROUP
            )
    return indices


@kernel
def _find_block(
    directory: tl.tensor,
    last: tl.tensor,
    rounds: tl.tensor,
    classes: tl.tensor,
    places: tl.tensor,
    k: tl.tensor,
    blocks: tl.tensor,
    MASK: tl.constexpr,
    SEARCHES: tl.constexpr,
) -> None:
    t = tl.program_id(0).to(tl.int64) * SEARCHES + tl.arange(0, SEARCHES)
    exists = t < k
    own = tl.load(classes + t, exists, 0).to(tl.int64)
    place = tl.load(places + t, exists, 0)
    low = tl.zeros([SEARCHES], tl.int64)  # directory[low] <= place < directory[high], once the two are neighbours
    high = low + last
    for _ in range(rounds):
        middle = (low + high) // 2
        passed = tl.load(directory + middle * (MASK + 1) + own, exists, 0) <= place
        low = tl.where(passed, middle, low)
        high = tl.where(passed, high, middle)
    tl.store(blocks + t, low.to(tl.int32), exists)


@kernel
def _find_element(
    old: tl.tensor,
    size: tl.tensor,
    directory: tl.tensor,
    classes: tl.tensor,
    places: tl.tensor,
    blocks: tl.tensor,
    k: tl.tensor,
    indices: tl.tensor,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    t = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    exists = t < k
    own = tl.load(classes + t, exists, 0).to(tl.int32)
    block = tl.load(blocks + t, exists, 0).to(tl.int64)
    passed = tl.load(places + t, exists, 0) - tl.load(directory + block * (MASK + 1) + own, exists, 0)
    first = (block * BLOCK)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    inside = lane < size - first
    bits = tl.load(old + first + lane, inside, 0)
    same = inside & (((bits >> SHIFT) & MASK).to(tl.int32) == own[:, None])
    hit = same & (tl.cumsum(same.to(tl.int32), 1) == passed[:, None] + 1)
    tl.store(indices + t, block * BLOCK + tl.sum(tl.where(hit, lane, 0), 1), exists)
