"""Reading the bit stream of a sparse chunk, which kernels/delta_bits.py writes.

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
    CODE_BITS,
    COUNT_ORDER,
    FIRST_PARAMETER,
    UNARY_LIMIT,
    ZERO_RUNS,
    golomb,
)
from anabranch.kernels.lanes import lowest_bit

PAD_WORDS = 8  # readable words after the last bit: more than one number takes
LARGEST = np.uint64(2**63)  # no number of the format reaches it
BAD_LENGTH, BAD_CLASS, BAD_COUNT, BAD_GAP, BAD_STEP, BAD_CODE = -1, -2, -3, -4, -5, -6
PROBLEMS = {
    BAD_LENGTH: "its bit stream ends early or late",
    BAD_CLASS: "it names a class that the dtype does not have",
    BAD_COUNT: "a class has more changes than the chunk",
    BAD_GAP: "a gap leads out of the chunk",
    BAD_STEP: "a step is wider than the dtype",
    BAD_CODE: "a number code is not allowed here",
}


@compiled
def _peek(words: Any, at: Any) -> Any:
    """The 64 bits from position `at` on, the first in the lowest place."""
    word, offset = at >> 6, np.uint64(at & 63)
    return (words[word] >> offset) | ((words[word + 1] << np.uint64(1)) << (np.uint64(63) - offset))


@compiled
def _low(x: Any, bits: Any) -> Any:
    return x & ((np.uint64(1) << np.uint64(bits)) - np.uint64(1))


@compiled
def _exp_golomb(words: Any, at: Any, order: Any) -> Any:
    """(number, position after it); position −1 if it has more than 62 bits."""
    n = lowest_bit(~_peek(words, at))
    if n + order > 62:
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
        if q > LARGEST // m:
            return np.uint64(0), -1
        window = _peek(words, at)
    if width == 0:
        return q, at
    r = _low(window, width - 1)  # truncated binary, without a branch on which remainders are short: they come at random
    long = np.uint64(r >= short)
    last = (window >> np.uint64(width - 1)) & np.uint64(1)
    return q * m + r + long * (r + last - short), at + width - 1 + np.int64(long)


@compiled
def _plain(words: Any, at: Any, bits: Any, first: Any, last: Any, limit: Any, code: Any, out: Any) -> Any:
    """As `_numbers`, for a list in plain Golomb code. Numbers are taken from a window of 64 bits until it might not hold the
    next one whole: one number then waits for the one before it through a register and not through memory."""
    m, width, short = golomb(code)
    window, used = _peek(words, at), 0
    for i in range(first, last):
        ones = lowest_bit(~window)
        if ones < UNARY_LIMIT and used + ones + 1 + width <= 64:
            x = np.uint64(ones)
            taken = ones + 1
            if width > 0:
                rest = window >> np.uint64(taken)
                r = _low(rest, width - 1)
                long = np.uint64(r >= short)
                x = x * m + r + long * (r + ((rest >> np.uint64(width - 1)) & np.uint64(1)) - short)
                taken += width - 1 + np.int64(long)
            window >>= np.uint64(taken)
            used += taken
        else:
            x, at = _golomb(words, at + used, m, width, short)
            if at < 0 or at > bits:
                return BAD_LENGTH
            window, used = _peek(words, at), 0
        if x > limit:
            return BAD_GAP
        out[i] = x
    at += used
    return at if at <= bits else BAD_LENGTH


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
        return _plain(words, at, bits, first, last, limit, code, out)
    codes = _peek(words, at)
    run_code = np.int64(_low(codes, CODE_BITS))
    other_code = np.int64(_low(codes >> np.uint64(CODE_BITS), CODE_BITS))
    at += 2 * CODE_BITS
    if run_code < FIRST_PARAMETER or other_code < FIRST_PARAMETER:
        return BAD_CODE
    run_m, run_width, run_short = golomb(run_code)
    other_m, other_width, other_short = golomb(other_code)
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
        for start in range(first, last, 64):
            signs = _peek(words, at)
            n = min(64, last - start)
            for j in range(n):
                negative = np.uint64(0) - ((signs >> np.uint64(j)) & np.uint64(1))  # all ones or none
                steps[start + j] = (np.uint64(steps[start + j]) + np.uint64(1) ^ negative) - negative
            at += n
        first = last
    return at
