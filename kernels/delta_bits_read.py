"""Reading the bit stream of a sparse chunk (kernels/delta_bits.py writes it).

Invariant: for any bits whatever `read_classes` returns the number of bits read or an error code, writes only into its
output arrays, and takes time proportional to the bits and the number of changes. Equal to kernels/delta_reference.py,
held by tests/property/test_delta_kernels.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anabranch.kernels.compiled import compiled
from anabranch.kernels.delta_bits import (
    ALL_ZERO,
    BAD_CLASS,
    BAD_CODE,
    BAD_COUNT,
    BAD_GAP,
    BAD_LENGTH,
    BAD_STEP,
    CODE_BITS,
    COUNT_ORDER,
    FIRST_PARAMETER,
    UNARY_LIMIT,
    ZERO_RUNS,
    _bit_length,
    parameter,
)
from anabranch.kernels.lanes import lowest_bit


@compiled
def _peek(words: Any, at: Any) -> Any:
    """The 64 bits from position `at` on, the first in the lowest place."""
    word, offset = at >> 6, np.uint64(at & 63)
    if offset == 0:
        return words[word]
    return (words[word] >> offset) | (words[word + 1] << (np.uint64(64) - offset))


@compiled
def _low(x: Any, bits: Any) -> Any:
    return x & ((np.uint64(1) << np.uint64(bits)) - np.uint64(1))


@compiled
def _exp_golomb(words: Any, at: Any, order: Any) -> Any:
    """(number, position after it); position −1 if it has more than 62 bits."""
    n = lowest_bit(~_peek(words, at))
    if n > 62:
        return np.uint64(0), -1
    at += n + 1
    y = _low(_peek(words, at), n) | (np.uint64(1) << np.uint64(n))
    at += n
    low = _low(_peek(words, at), order)
    return ((y - np.uint64(1)) << np.uint64(order)) | low, at + order


@compiled
def _golomb(words: Any, at: Any, m: Any, width: Any, short: Any) -> Any:
    """(number, position after it); position −1 if the number cannot be one."""
    window = _peek(words, at)
    ones = lowest_bit(~window)
    if ones < UNARY_LIMIT:
        q = np.uint64(ones)
        window >>= np.uint64(ones + 1)
        at += ones + 1
    else:
        q, at = _exp_golomb(words, at + UNARY_LIMIT, 0)
        if at < 0:
            return np.uint64(0), -1
        q += np.uint64(UNARY_LIMIT)
        window = _peek(words, at)
    if width == 0:
        return q, at
    r = _low(window, width - 1)
    if r < short:
        return q * m + r, at + width - 1
    r = (r << np.uint64(1)) | ((window >> np.uint64(width - 1)) & np.uint64(1))
    return q * m + r - short, at + width


@compiled
def _numbers(words: Any, at: Any, bits: Any, first: Any, last: Any, limit: Any, out: Any) -> Any:
    """Numbers, none above `limit`, into out[first:last]; returns the position after them, or an error code."""
    code = np.int64(_low(_peek(words, at), CODE_BITS))
    at += CODE_BITS
    if code == ALL_ZERO:
        for i in range(first, last):
            out[i] = 0
        return at
    if code != ZERO_RUNS:
        m = parameter(code - FIRST_PARAMETER)
        width = _bit_length(m - np.uint64(1))
        short = (np.uint64(1) << np.uint64(width)) - m
        for i in range(first, last):
            x, at = _golomb(words, at, m, width, short)
            if at < 0 or at > bits:
                return BAD_LENGTH
            if x > limit:
                return BAD_GAP
            out[i] = x
        return at
    codes = _peek(words, at)
    run_code = np.int64(_low(codes, CODE_BITS))
    other_code = np.int64(_low(codes >> np.uint64(CODE_BITS), CODE_BITS))
    at += 2 * CODE_BITS
    if run_code < FIRST_PARAMETER or other_code < FIRST_PARAMETER:
        return BAD_CODE
    run_m, other_m = parameter(run_code - FIRST_PARAMETER), parameter(other_code - FIRST_PARAMETER)
    run_width, other_width = _bit_length(run_m - np.uint64(1)), _bit_length(other_m - np.uint64(1))
    run_short = (np.uint64(1) << np.uint64(run_width)) - run_m
    other_short = (np.uint64(1) << np.uint64(other_width)) - other_m
    i = first
    while i < last:
        run, at = _golomb(words, at, run_m, run_width, run_short)
        if at < 0 or at > bits:
            return BAD_LENGTH
        if run > np.uint64(last - i):
            return BAD_COUNT
        for _ in range(np.int64(run)):
            out[i] = 0
            i += 1
        if i < last:
            x, at = _golomb(words, at, other_m, other_width, other_short)
            if at < 0 or at > bits:
                return BAD_LENGTH
            if x >= limit:
                return BAD_GAP
            out[i] = x + np.uint64(1)
            i += 1
    return at


@compiled
def read_classes(
    words: Any, bits: Any, elements: Any, mask: Any, largest_step: Any, counts: Any, gaps: Any, steps: Any
) -> Any:
    """Inverse of `write_classes`; returns the bits read, or an error code (below 0, see PROBLEMS).

    Args:
        words: uint64, the stream and PAD_WORDS zero words after it; bits: its length.
        elements: of the chunk, which no gap may exceed; mask: the largest class; largest_step: 2^(width − 1).
        counts: int64 [256] zeros, changes of each class on return.
        gaps, steps: uint32 [k] and unsigned integers of the dtype's width [k]: for all k changes of the chunk.
    """
    at, first, c = 0, 0, -1
    while first < gaps.size:
        skip, at = _exp_golomb(words, at, 0)
        if at < 0 or at > bits:
            return BAD_LENGTH
        if skip >= np.uint64(mask - c):
            return BAD_CLASS
        c += 1 + int(skip)
        n, at = _exp_golomb(words, at, COUNT_ORDER)
        if at < 0 or at > bits:
            return BAD_LENGTH
        if n >= np.uint64(gaps.size - first):
            return BAD_COUNT
        counts[c] = np.int64(n) + 1
        last = first + counts[c]
        at = _numbers(words, at, bits, first, last, np.uint64(elements), gaps)
        if at < 0:
            return at
        at = _numbers(words, at, bits, first, last, largest_step - np.uint64(1), steps)
        if at < 0:
            return BAD_STEP if at == BAD_GAP else at
        if at + counts[c] > bits:
            return BAD_LENGTH
        for i in range(first, last):
            size = steps[i] + steps.dtype.type(1)
            negative = (words[at >> 6] >> np.uint64(at & 63)) & np.uint64(1)
            steps[i] = -size if negative else size
            at += 1
        first = last
    return at
