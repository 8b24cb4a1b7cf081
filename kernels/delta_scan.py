"""The passes of the encoder over dense weights: which elements changed, and what is sent of each change.

The *class* of an element is the exponent of its old value, `(bits >> shift) & mask`: whether a step changes an element
depends on |update| / ulp(old), and the receiver knows the old value as well. The *gap* of a changed element is the
number of elements of its class between the change before it and itself, over all pieces of a chunk.

Invariant: `scan` marks exactly the elements whose bits differ; `take_changes` counts every element of every piece once,
in order (what it has counted is passed from piece to piece). kernels/delta_locate.py is the way back. Equal to
kernels/delta_reference.py, held by tests/property/test_delta_kernels.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.compiled import compiled
from anabranch.kernels.delta_dtypes import CLASSES, BitForm, Bits
from anabranch.kernels.heavy_classes import heavy_classes
from anabranch.kernels.lanes import LANES, changed_mask, equal_mask, lowest_bit, popcount, put_classes
from anabranch.kernels.ordered import ordered


def scan(old: Bits, new: Bits) -> tuple[NDArray[np.uint64], int]:
    """Which elements of `old` [n] and `new` [n] (same unsigned dtype, C-contiguous) differ as bits, and how many.

    Returns:
        uint64 [⌈n / 64⌉]: bit j of word b is set if element 64·b + j differs.
    """
    words = np.empty(-(-old.size // LANES), np.uint64)
    return words, int(_scan(old, new, words))


@compiled
def _scan(old: Any, new: Any, words: Any) -> Any:
    blocks = old.size // LANES
    count = 0
    for block in range(blocks):
        mask = changed_mask(old, new, block * LANES)
        words[block] = mask
        count += popcount(mask)
    if blocks < words.size:
        mask = np.uint64(0)
        for i in range(blocks * LANES, old.size):
            mask |= np.uint64(old[i] != new[i]) << np.uint64(i & (LANES - 1))
        words[blocks] = mask
        count += popcount(mask)
    return count


class ClassCounts:
    """What the encoder has passed of every class, from piece to piece of a chunk.

    int64 [256] each: `passed`, elements so far; `following`, the rank after the last change; `changed`, changes so far.
    """

    def __init__(self) -> None:
        self.passed, self.following, self.changed = np.zeros((3, CLASSES), np.int64)


def take_changes(
    old: Bits,
    new: Bits,
    words: NDArray[np.uint64],
    form: BitForm,
    seen: ClassCounts,
    out: tuple[NDArray[np.uint8], NDArray[np.uint32], Bits],
) -> None:
    """Class (uint8 [k]), gap (uint32 [k]) and step [k] of every change that `words` (see `scan`) marks, into `out`.

    `old`, `new` [n]; the step is ordered(new) − ordered(old) modulo 2^width.
    """
    shift, mask = form.uint(form.exponent_shift), form.uint(form.exponent_mask)
    sign = form.uint(form.sign_bit if form.is_float else 0)
    heavy = heavy_classes(old, shift, mask)
    _take(old, new, words, shift, mask, sign, heavy, seen.passed, seen.following, seen.changed, *out)


@compiled
def _take(
    old: Any, new: Any, words: Any, shift: Any, mask: Any, sign: Any, heavy: Any, passed: Any, following: Any, counts: Any,
    out_class: Any, out_gap: Any, out_step: Any,
) -> None:  # fmt: skip
    classes = np.empty(LANES, np.uint8)
    blocks = old.size // LANES
    t = 0
    for block in range(blocks):
        start = block * LANES
        put_classes(old, start, shift, mask, classes)
        changed = words[block]
        while changed != 0:
            j = lowest_bit(changed)
            changed &= changed - np.uint64(1)
            c = classes[j]
            below = (np.uint64(1) << np.uint64(j)) - np.uint64(1)
            rank = passed[c] + popcount(equal_mask(classes, c) & below)
            out_class[t] = c
            out_gap[t] = rank - following[c]
            out_step[t] = ordered(new[start + j], sign) - ordered(old[start + j], sign)
            following[c] = rank + 1
            counts[c] += 1
            t += 1
        counted = np.uint64(0)
        for h in range(heavy.size):
            members = equal_mask(classes, heavy[h])
            counted |= members
            passed[heavy[h]] += popcount(members)
        others = ~counted
        while others != 0:
            passed[classes[lowest_bit(others)]] += 1
            others &= others - np.uint64(1)
    for i in range(blocks * LANES, old.size):
        c = np.uint8((old[i] >> shift) & mask)
        if (words[blocks] >> np.uint64(i & (LANES - 1))) & np.uint64(1):
            out_class[t] = c
            out_gap[t] = passed[c] - following[c]
            out_step[t] = ordered(new[i], sign) - ordered(old[i], sign)
            following[c] = passed[c] + 1
            counts[c] += 1
            t += 1
        passed[c] += 1
