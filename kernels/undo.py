"""Undo records: which elements of a piece a version changed, and what they were before.

Invariant: `put_bits(piece, indices, old)` over the state after gives the state before, bit for bit; `merge_undo` of two
records in a row undoes both, since of an element that both changed it keeps the older bits. Held by
tests/property/test_version_history.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.compiled import compiled
from anabranch.kernels.delta_dtypes import Bits
from anabranch.kernels.lanes import LANES, lowest_bit

Indices = NDArray[np.uint32]


def marked(words: NDArray[np.uint64], count: int) -> Indices:
    """Positions of the `count` bits that are set in `words` (as `scan` returns them): uint32 [count], ascending."""
    out = np.empty(count, np.uint32)
    _marked(words, out)
    return out


@compiled
def _marked(words: Any, out: Any) -> None:
    t = 0
    for block in range(words.size):
        word = words[block]
        while word != 0:
            out[t] = block * LANES + lowest_bit(word)
            word &= word - np.uint64(1)
            t += 1


def take_bits(bits: Bits, indices: Indices) -> Bits:
    """bits[indices], without the GIL."""
    out = np.empty(indices.size, bits.dtype)
    _take_bits(bits, indices, out)
    return out


@compiled
def _take_bits(bits: Any, indices: Any, out: Any) -> None:
    for t in range(indices.size):
        out[t] = bits[indices[t]]


def put_bits(bits: Bits, indices: Indices, values: Bits) -> None:
    """bits[indices] = values, without the GIL."""
    _put_bits(bits, indices, values)


@compiled
def _put_bits(bits: Any, indices: Any, values: Any) -> None:
    for t in range(indices.size):
        bits[indices[t]] = values[t]


def merge_undo(older: tuple[Indices, Bits], newer: tuple[Indices, Bits]) -> tuple[Indices, Bits]:
    """One record for two that follow each other; indices ascending in all of them."""
    room = older[0].size + newer[0].size
    indices, bits = np.empty(room, np.uint32), np.empty(room, older[1].dtype)
    size = int(_merge_undo(*older, *newer, indices, bits))
    return indices[:size].copy(), bits[:size].copy()  # not views: they would keep all of the room


@compiled
def _merge_undo(older: Any, older_bits: Any, newer: Any, newer_bits: Any, out: Any, out_bits: Any) -> Any:
    i, j, t = 0, 0, 0
    while i < older.size or j < newer.size:
        if j == newer.size or (i < older.size and older[i] <= newer[j]):
            if j < newer.size and older[i] == newer[j]:
                j += 1
            out[t] = older[i]
            out_bits[t] = older_bits[i]
            i += 1
        else:
            out[t] = newer[j]
            out_bits[t] = newer_bits[j]
            j += 1
        t += 1
    return t
