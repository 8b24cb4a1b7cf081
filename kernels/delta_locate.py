"""The pass of the decoder over dense old weights: where the changes of each class lie.

Members of the heavy classes (kernels/heavy_classes.py) are counted 64 elements at a time; the few elements that are left
go through a countdown one by one.

Invariant: over the same old bits `locate` finds exactly the indices from which kernels/delta_scan.py took the gaps, and
for any gaps whatever it finds at most as many as there are and touches no memory outside its arguments. Which classes
are called heavy changes the speed alone. Equal to kernels/delta_reference.py, held by
tests/property/test_delta_kernels.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.compiled import compiled
from anabranch.kernels.delta_dtypes import CLASSES, BitForm, Bits
from anabranch.kernels.heavy_classes import heavy_classes
from anabranch.kernels.lanes import LANES, equal_mask, lowest_bit, nth_bit, popcount, put_classes
from anabranch.kernels.ordered import stepped

NONE_LEFT = 2**40  # more than a chunk has elements


class ClassCursors:
    """Where the decoder stands in every class, from piece to piece of a chunk.

    `left` int64 [256]: unchanged elements to pass before the next change; `at` int64 [256]: the gap after that one, in
    `following` int64 [k + 1]; `step_at` int64 [256]: the next step in `steps` [k].
    """

    def __init__(
        self, form: BitForm, counts: NDArray[np.int64], gaps: NDArray[np.uint32], steps: Bits, elements: int
    ) -> None:
        """`counts` [256] changes of each class; `gaps`, `steps` [k] grouped by class; `elements` of the chunk."""
        self.fields = form.uint(form.exponent_shift), form.uint(form.exponent_mask)
        self.sign = form.uint(form.sign_bit if form.is_float else 0)
        self.following = np.empty(gaps.size + 1, np.int64)
        self.left, self.at = np.empty(CLASSES, np.int64), np.empty(CLASSES, np.int64)
        _start(counts, gaps, self.following, self.left, self.at)
        self.step_at = self.at.copy()
        self.steps = steps
        self.changed_share = counts / elements


@compiled
def _start(counts: Any, gaps: Any, following: Any, left: Any, at: Any) -> None:
    """What follows each gap is the next one of its class, or none."""
    first = 0
    for c in range(counts.size):
        left[c], at[c] = NONE_LEFT, first
        if counts[c] > 0:
            left[c] = gaps[first]
            for i in range(first, first + counts[c] - 1):
                following[i] = gaps[i + 1]
            first += counts[c]
            following[first - 1] = NONE_LEFT
    following[first] = NONE_LEFT  # read, and not used, for classes without changes


def locate(old: Bits, cursors: ClassCursors, room: int) -> tuple[NDArray[np.uint32], Bits]:
    """The changes that lie in `old` [n]: their indices (uint32 [found], ascending) and new bits [found].

    `cursors` goes on from the pieces before; `room` is how many changes are still to come.
    """
    indices = np.empty(min(room, old.size) + LANES, np.uint32)
    heavy = heavy_classes(old, *cursors.fields, cursors.changed_share)
    found = _locate(old, *cursors.fields, heavy, cursors.left, cursors.at, cursors.following, indices)
    indices = indices[:found].copy()  # a view would keep the room for all changes to come alive, for every piece
    bits = np.empty(found, old.dtype)
    _new_bits(old, indices, *cursors.fields, cursors.sign, cursors.steps, cursors.step_at, bits)
    return indices, bits


@compiled
def _locate(old: Any, shift: Any, mask: Any, heavy: Any, left: Any, at: Any, following: Any, out: Any) -> Any:
    found = 0
    classes = np.empty(LANES, np.uint8)
    blocks = old.size // LANES
    for block in range(blocks):
        start = block * LANES
        put_classes(old, start, shift, mask, classes)
        seen, hits = np.uint64(0), np.uint64(0)
        for h in range(heavy.size):
            c = heavy[h]
            members = equal_mask(classes, c)
            seen |= members
            after = left[c] - popcount(members)
            if after < 0:
                passed = left[c]
                while True:
                    hit_bit = nth_bit(members, np.uint64(passed))
                    hits |= hit_bit
                    members &= ~((hit_bit << np.uint64(1)) - np.uint64(1))  # those after it
                    passed = following[at[c]]
                    at[c] += 1
                    after = passed - popcount(members)
                    if after >= 0:
                        break
            left[c] = after
        others = ~seen
        while others != 0:  # without a branch on the hit: in these classes it is the rule or a toss-up
            c = classes[lowest_bit(others)]
            after = left[c] - 1
            hit = after >> 63  # −1 or 0
            left[c] = after ^ ((after ^ following[at[c]]) & hit)
            at[c] -= hit
            rest = others & (others - np.uint64(1))
            hits |= (others ^ rest) & np.uint64(hit)
            others = rest
        if hits != 0:
            n = popcount(hits)
            for j in range(4):  # at most 4 in nearly all blocks: without a branch to mispredict
                out[found + j] = start + lowest_bit(hits)
                hits &= hits - np.uint64(1)
            for j in range(4, n):
                out[found + j] = start + lowest_bit(hits)
                hits &= hits - np.uint64(1)
            found += n
    for i in range(blocks * LANES, old.size):
        c = np.uint8((old[i] >> shift) & mask)
        left[c] -= 1
        if left[c] < 0:
            left[c] = following[at[c]]
            at[c] += 1
            out[found] = i
            found += 1
    return found


@compiled
def _new_bits(old: Any, indices: Any, shift: Any, mask: Any, sign: Any, steps: Any, step_at: Any, out: Any) -> None:
    for t in range(indices.size):
        bits = old[indices[t]]
        c = np.uint8((bits >> shift) & mask)
        out[t] = stepped(bits, steps[step_at[c]], sign)
        step_at[c] += 1
