"""Which classes of a piece are worth a compare per block of 64 elements.

Most weights of a tensor have one of a dozen exponents. Counting the members of such a *heavy* class in a block takes three
instructions a class; the few elements of all other classes are taken one by one.

Invariant: which classes are called heavy changes the speed of the passes alone, never what they find. Held by
tests/property/test_delta_kernels.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.compiled import compiled
from anabranch.kernels.delta_dtypes import CLASSES, Bits
from anabranch.kernels.lanes import LANES

MAX_HEAVY = 12
SAMPLE_BLOCKS = 64
# Cycles, roughly, as measured: a compare of a block with a class, an element by itself (a loop that ends at random
# included), and a change of the decoder's found among 64.
COMPARE_COST, ELEMENT_COST, HIT_COST = 3, 16, 60
NO_HITS = np.zeros(CLASSES)


def heavy_classes(bits: Bits, shift: Any, mask: Any, hits: NDArray[np.float64] = NO_HITS) -> NDArray[np.uint8]:
    """The heavy classes of `bits` [n], at most MAX_HEAVY, by a sample. `hits` [256]: changes of each class that a decoder
    has to find, as a share of all elements."""
    heavy = np.empty(MAX_HEAVY, np.uint8)
    return heavy[: _pick(bits, shift, mask, hits, heavy)]


@compiled
def _pick(bits: Any, shift: Any, mask: Any, hits: Any, heavy: Any) -> Any:
    blocks = bits.size // LANES
    if blocks < 4:
        return 0
    gain = np.zeros(CLASSES)
    taken = min(blocks, SAMPLE_BLOCKS)
    for b in range(taken):
        start = b * blocks // taken * LANES
        for i in range(start, start + LANES):
            gain[(bits[i] >> shift) & mask] += 1
    for c in range(CLASSES):
        gain[c] = LANES * (ELEMENT_COST * gain[c] / (taken * LANES) - HIT_COST * hits[c]) - COMPARE_COST
    for n in range(heavy.size):
        best = np.argmax(gain)
        if gain[best] <= 0:
            return n
        heavy[n] = best
        gain[best] = 0
    return heavy.size
