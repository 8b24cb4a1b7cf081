"""The bit stream of a sparse chunk: changes grouped by class, as Golomb-coded numbers.

Within a class a step changes elements nearly at random with one probability, so gaps between changes are geometric, and
the Golomb code is the best prefix code for those (Gallager and van Voorhis 1975). Where most numbers are 0 (gaps in a
class in which most elements change; sizes of steps where all are ±1) runs of zeros are coded instead.

Invariant: `read_classes` gives back what `write_classes` was given, and for any other bits whatever it returns an error
code without reading or writing outside its arguments, in time proportional to the bits and the number of changes.
Docs: docs/delta-format.md. Equal to kernels/delta_reference.py, held by tests/property/test_delta_kernels.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anabranch.kernels.compiled import compiled
from anabranch.kernels.delta_dtypes import CLASSES

PAD_WORDS = 8  # readable words after the last bit: more than one number takes
UNARY_LIMIT = 20  # quotients from here on are escaped
COUNT_ORDER = 8  # exp-Golomb order of a class's number of changes
CODE_BITS = 7  # a code: 0 all zero, 1 runs of zeros, from 2 on Golomb with parameter(code - 2)
ALL_ZERO, ZERO_RUNS, FIRST_PARAMETER = 0, 1, 2

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
def parameter(i: Any) -> Any:
    """The i-th Golomb parameter: 1, 2, 3, then four to an octave: 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ..."""
    if i < 3:
        return np.uint64(i + 1)
    return np.uint64(4 + ((i - 3) & 3)) << np.uint64((i - 3) >> 2)


@compiled
def _code_for(mean: Any) -> Any:
    """The code whose parameter is nearest to the best one for geometric numbers of that mean, ln 2 · (mean + ½)."""
    target = 0.6931471805599453 * (mean + 0.5)
    i = 0
    while i < (1 << CODE_BITS) - 1 - FIRST_PARAMETER and parameter(i) + parameter(i + 1) < 2 * target:
        i += 1
    return i + FIRST_PARAMETER


@compiled
def _bit_length(x: Any) -> Any:
    n = 0
    while x != 0:
        n += 1
        x >>= np.uint64(1)
    return n


@compiled
def _exp_golomb_bits(x: Any, order: Any) -> Any:
    return 2 * _bit_length((x >> np.uint64(order)) + np.uint64(1)) - 1 + order


@compiled
def _golomb_bits(x: Any, m: Any, width: Any, short: Any) -> Any:
    """Bits of `x` under parameter `m`, of which `width` = bit length of m − 1 and `short` = 2^width − m."""
    q = x // m
    bits = width - 1 if x - q * m < short else width
    if q < UNARY_LIMIT:
        return bits + np.int64(q) + 1
    return bits + UNARY_LIMIT + _exp_golomb_bits(q - np.uint64(UNARY_LIMIT), 0)


@compiled
def _choose(values: Any, first: Any, last: Any, codes: Any) -> Any:
    """The cheaper coding of values[first:last] into codes [3] (plain or kind, runs, others), and its bits."""
    zeros, total = 0, 0.0
    for i in range(first, last):
        zeros += values[i] == 0
        total += values[i]
    n = last - first
    if zeros == n:
        codes[0] = ALL_ZERO
        return CODE_BITS
    codes[0] = _code_for(total / n)
    m = parameter(codes[0] - FIRST_PARAMETER)
    width = _bit_length(m - np.uint64(1))
    short = (np.uint64(1) << np.uint64(width)) - m
    plain = CODE_BITS
    for i in range(first, last):
        plain += _golomb_bits(np.uint64(values[i]), m, width, short)
    if 2 * zeros < n:
        return plain
    codes[1] = _code_for(zeros / (n - zeros + 1))
    codes[2] = _code_for((total - (n - zeros)) / (n - zeros))
    run_m, other_m = parameter(codes[1] - FIRST_PARAMETER), parameter(codes[2] - FIRST_PARAMETER)
    run_width, other_width = _bit_length(run_m - np.uint64(1)), _bit_length(other_m - np.uint64(1))
    run_short = (np.uint64(1) << np.uint64(run_width)) - run_m
    other_short = (np.uint64(1) << np.uint64(other_width)) - other_m
    runs = 3 * CODE_BITS
    run = np.uint64(0)
    for i in range(first, last):
        if values[i] == 0:
            run += np.uint64(1)
        else:
            runs += _golomb_bits(run, run_m, run_width, run_short)
            runs += _golomb_bits(np.uint64(values[i]) - np.uint64(1), other_m, other_width, other_short)
            run = np.uint64(0)
    if run > 0:
        runs += _golomb_bits(run, run_m, run_width, run_short)
    if runs < plain:
        codes[0] = ZERO_RUNS
        return runs
    return plain


@compiled
def plan_classes(counts: Any, gaps: Any, sizes: Any, codes: Any) -> Any:
    """Choose the codes (int64 [256, 6]: three for gaps, three for sizes) of every class; returns the bits in all.

    Args:
        counts: int64 [256], changes of each class.
        gaps, sizes: [k] grouped by class: unchanged elements passed; |step| − 1.
    """
    bits, first, previous = 0, 0, -1
    for c in range(CLASSES):
        if counts[c] == 0:
            continue
        last = first + counts[c]
        bits += _exp_golomb_bits(np.uint64(c - previous - 1), 0)
        bits += _exp_golomb_bits(np.uint64(counts[c] - 1), COUNT_ORDER)
        bits += _choose(gaps, first, last, codes[c, :3]) + _choose(sizes, first, last, codes[c, 3:])
        bits += counts[c]
        first, previous = last, c
    return bits


@compiled
def _put(words: Any, at: Any, value: Any, bits: Any) -> Any:
    """Append the low `bits` (0 to 64) of `value`, lowest first; returns the position after them."""
    if bits == 0:
        return at
    word, offset = at >> 6, np.uint64(at & 63)
    words[word] |= value << offset
    if offset + np.uint64(bits) > np.uint64(64):
        words[word + 1] |= value >> (np.uint64(64) - offset)
    return at + bits


@compiled
def _put_exp_golomb(words: Any, at: Any, x: Any, order: Any) -> Any:
    y = (x >> np.uint64(order)) + np.uint64(1)
    n = _bit_length(y) - 1
    at = _put(words, at, (np.uint64(1) << np.uint64(n)) - np.uint64(1), n + 1)
    at = _put(words, at, y ^ (np.uint64(1) << np.uint64(n)), n)
    return _put(words, at, x & ((np.uint64(1) << np.uint64(order)) - np.uint64(1)), order)


@compiled
def _put_golomb(words: Any, at: Any, x: Any, m: Any, width: Any, short: Any) -> Any:
    q = x // m
    r = x - q * m
    if q < UNARY_LIMIT:
        at = _put(words, at, (np.uint64(1) << q) - np.uint64(1), np.int64(q) + 1)
    else:
        at = _put(words, at, (np.uint64(1) << np.uint64(UNARY_LIMIT)) - np.uint64(1), UNARY_LIMIT)
        at = _put_exp_golomb(words, at, q - np.uint64(UNARY_LIMIT), 0)
    if width == 0:
        return at
    if r < short:
        return _put(words, at, r, width - 1)
    at = _put(words, at, (r + short) >> np.uint64(1), width - 1)
    return _put(words, at, (r + short) & np.uint64(1), 1)


@compiled
def _put_numbers(words: Any, at: Any, values: Any, first: Any, last: Any, codes: Any) -> Any:
    at = _put(words, at, np.uint64(codes[0]), CODE_BITS)
    if codes[0] == ALL_ZERO:
        return at
    if codes[0] != ZERO_RUNS:
        m = parameter(codes[0] - FIRST_PARAMETER)
        width = _bit_length(m - np.uint64(1))
        short = (np.uint64(1) << np.uint64(width)) - m
        for i in range(first, last):
            at = _put_golomb(words, at, np.uint64(values[i]), m, width, short)
        return at
    at = _put(words, at, np.uint64(codes[1]), CODE_BITS)
    at = _put(words, at, np.uint64(codes[2]), CODE_BITS)
    run_m, other_m = parameter(codes[1] - FIRST_PARAMETER), parameter(codes[2] - FIRST_PARAMETER)
    run_width, other_width = _bit_length(run_m - np.uint64(1)), _bit_length(other_m - np.uint64(1))
    run_short = (np.uint64(1) << np.uint64(run_width)) - run_m
    other_short = (np.uint64(1) << np.uint64(other_width)) - other_m
    run = np.uint64(0)
    for i in range(first, last):
        if values[i] == 0:
            run += np.uint64(1)
        else:
            at = _put_golomb(words, at, run, run_m, run_width, run_short)
            at = _put_golomb(words, at, np.uint64(values[i]) - np.uint64(1), other_m, other_width, other_short)
            run = np.uint64(0)
    if run > 0:
        at = _put_golomb(words, at, run, run_m, run_width, run_short)
    return at


@compiled
def write_classes(words: Any, counts: Any, gaps: Any, sizes: Any, negative: Any, codes: Any) -> Any:
    """Write all classes into `words` (uint64, zeros, room for the bits of `plan_classes` and one word); returns bits."""
    at, first, previous = 0, 0, -1
    for c in range(CLASSES):
        if counts[c] == 0:
            continue
        last = first + counts[c]
        at = _put_exp_golomb(words, at, np.uint64(c - previous - 1), 0)
        at = _put_exp_golomb(words, at, np.uint64(counts[c] - 1), COUNT_ORDER)
        at = _put_numbers(words, at, gaps, first, last, codes[c, :3])
        at = _put_numbers(words, at, sizes, first, last, codes[c, 3:])
        for i in range(first, last):
            at = _put(words, at, np.uint64(negative[i]), 1)
        first, previous = last, c
    return at
