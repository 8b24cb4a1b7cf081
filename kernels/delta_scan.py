"""The passes of the encoder over dense weights: which elements changed, their classes, ranks and steps.

The *class* of an element is the exponent of its old value, `(bits >> shift) & mask`: whether a step changes an element
depends on |update| / ulp(old), and the receiver knows the old value as well. The *rank* of a changed element is the
number of elements of its class before it in the chunk.

Invariant: `scan` finds exactly the elements whose bits differ; ranks count every element of the chunk's pieces once, in
order (the counts so far are passed from piece to piece). kernels/delta_locate.py is the way back. Equal to
kernels/delta_reference.py, held by tests/property/test_delta_kernels.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.compiled import compiled
from anabranch.kernels.delta_dtypes import CLASSES, Bits
from anabranch.kernels.lanes import LANES, changed_mask, class_mask, lowest_bit, popcount

FIRST_CAPACITY = 1 / 16  # of the elements: room for changes before the scan is repeated with room for all


def scan(old: Bits, new: Bits) -> NDArray[np.uint32]:
    """Flat indices, ascending, at which `old` [n] and `new` [n] (same unsigned dtype, C-contiguous) differ as bits."""
    capacity = int(old.size * FIRST_CAPACITY) + 2 * LANES
    out = np.empty(capacity, np.uint32)
    count = _scan(old, new, out)
    if count > capacity - LANES:
        out = np.empty(old.size + LANES, np.uint32)
        count = _scan(old, new, out)
    return out[:count]


@compiled
def _scan(old: Any, new: Any, out: Any) -> Any:
    """Number of changed elements, their indices in `out`; more than out.size − 64: there was no room, call again."""
    count = 0
    blocks = old.size // LANES
    for block in range(blocks):
        start = block * LANES
        mask = changed_mask(old, new, start)
        if mask != 0:
            if count > out.size - 2 * LANES:
                return out.size
            changed = popcount(mask)
            for j in range(4):  # at most 4 in nearly all blocks: without a branch to mispredict
                out[count + j] = start + lowest_bit(mask)
                mask &= mask - np.uint64(1)
            for j in range(4, changed):
                out[count + j] = start + lowest_bit(mask)
                mask &= mask - np.uint64(1)
            count += changed
    for i in range(blocks * LANES, old.size):
        if count > out.size - LANES:
            return out.size
        out[count] = i
        count += old[i] != new[i]
    return count


def class_counts() -> NDArray[np.uint32]:
    """Elements of each class so far, none yet: uint32 [4, 256], whose sum over the first axis is what counts. Four
    tables, since neighbours are often of one class and an increment waits for the one before it."""
    return np.zeros((4, CLASSES), np.uint32)


@compiled
def ranks(old: Any, indices: Any, shift: Any, mask: Any, counts: Any, out_class: Any, out_rank: Any) -> None:
    """For each of `indices` [k] (ascending) into `old` [n]: its class (uint8 [k]) and its rank (uint32 [k]).

    `counts` (see `class_counts`) goes on from the pieces before and holds this one as well afterwards. `shift` and
    `mask` are of the dtype of `old`.
    """
    field = old.dtype.type(mask << shift)
    blocks = old.size // LANES
    t = 0
    for block in range(blocks):
        start = block * LANES
        while t < indices.size and indices[t] < start + LANES:
            bits = old[indices[t]]
            c = (bits >> shift) & mask
            below = (np.uint64(1) << np.uint64(indices[t] - start)) - np.uint64(1)
            same = class_mask(old, start, field, old.dtype.type(bits & field)) & below
            out_class[t] = c
            out_rank[t] = counts[0, c] + counts[1, c] + counts[2, c] + counts[3, c] + popcount(same)
            t += 1
        _count_block(old, start, shift, mask, counts)
    for i in range(blocks * LANES, old.size):
        c = (old[i] >> shift) & mask
        if t < indices.size and indices[t] == i:
            out_class[t] = c
            out_rank[t] = counts[0, c] + counts[1, c] + counts[2, c] + counts[3, c]
            t += 1
        counts[0, c] += np.uint32(1)


@compiled
def _count_block(old: Any, start: Any, shift: Any, mask: Any, counts: Any) -> None:
    for i in range(start, start + LANES, 4):
        counts[0, (old[i] >> shift) & mask] += np.uint32(1)
        counts[1, (old[i + 1] >> shift) & mask] += np.uint32(1)
        counts[2, (old[i + 2] >> shift) & mask] += np.uint32(1)
        counts[3, (old[i + 3] >> shift) & mask] += np.uint32(1)
