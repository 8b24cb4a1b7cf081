"""Writing the bit stream of a sparse chunk: changes grouped by class, as Golomb-coded numbers.

Within a class a step changes elements nearly at random with one probability, so gaps between changes are geometric, and
the Golomb code is the best prefix code for those (Gallager and van Voorhis 1975). Where most numbers are 0 (gaps in a
class in which most elements change; sizes of steps where all are ±1) runs of zeros are coded instead.

Invariant: kernels/delta_bits_read.py gives back what `write_classes` was given, and `plan_classes` never promises too
little room. Docs: docs/delta-format.md. Equal to kernels/delta_reference.py, held by
tests/property/test_delta_kernels.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anabranch.kernels.compiled import compiled
from anabranch.kernels.delta_dtypes import CLASSES

UNARY_LIMIT = 20  # quotients from here on are escaped
ESCAPED_BITS = UNARY_LIMIT + 2 * 64  # at most, of an escaped quotient
COUNT_ORDER = 8  # exp-Golomb order of a class's number of changes
CODE_BITS = 7  # a code: 0 all zero, 1 runs of zeros, from 2 on Golomb with parameter(code - 2)
EXACT = np.uint64(2**52)  # below, an integer is a float64, and its product with 1 / m less than 1 off
ALL_ZERO, ZERO_RUNS, FIRST_PARAMETER = 0, 1, 2


@compiled
def parameter(i: Any) -> Any:
    """The i-th Golomb parameter: 1, 2, 3, then four to an octave: 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ..."""
    if i < 3:
        return np.uint64(i + 1)
    return np.uint64(4 + ((i - 3) & 3)) << np.uint64((i - 3) >> 2)


@compiled
def bit_length(x: Any) -> Any:
    n = 0
    while x != 0:
        n += 1
        x >>= np.uint64(1)
    return n


@compiled
def golomb(code: Any) -> Any:
    """Of a code from FIRST_PARAMETER on: parameter m, width = bit length of m − 1, short = 2^width − m."""
    m = parameter(code - FIRST_PARAMETER)
    width = bit_length(m - np.uint64(1))
    return m, width, (np.uint64(1) << np.uint64(width)) - m


@compiled
def _code_for(mean: Any) -> Any:
    """The code whose parameter is nearest to the best one for geometric numbers of that mean, ln 2 · (mean + ½)."""
    target = 0.6931471805599453 * (mean + 0.5)
    i = 0
    while i < (1 << CODE_BITS) - 1 - FIRST_PARAMETER and parameter(i) + parameter(i + 1) < 2 * target:
        i += 1
    return i + FIRST_PARAMETER


@compiled
def _exp_golomb_bits(x: Any, order: Any) -> Any:
    return 2 * bit_length((x >> np.uint64(order)) + np.uint64(1)) - 1 + order


@compiled
def _divide(x: Any, m: Any, inverse: Any) -> Any:
    """(quotient, remainder) of x / m, given 1 / m: by a product where that is exact, which a processor can overlap with the
    next one, as it cannot a division."""
    product = np.float64(np.int64(x)) * inverse
    if x < EXACT and product < UNARY_LIMIT:
        q = np.uint64(np.int64(product))
        r = x - q * m
        above = np.uint64(r >= m)  # of a multiple of m the product may fall short, but by no more
        return q + above, r - m * above
    q = x // m
    return q, x - q * m


@compiled
def _golomb_bits(x: Any, m: Any, width: Any, short: Any) -> Any:
    q, r = _divide(x, m, 1 / m)
    bits = width - 1 + (r >= short)
    if q < UNARY_LIMIT:
        return bits + np.int64(q) + 1
    return bits + UNARY_LIMIT + _exp_golomb_bits(q - np.uint64(UNARY_LIMIT), 0)


@compiled
def _sums(values: Any, first: Any, last: Any) -> Any:
    """How many of values[first:last] are 0, and their sum as a float."""
    zeros, total = 0, np.uint64(0)
    if values.itemsize == 8:  # these alone can overflow
        approximate = 0.0
        for i in range(first, last):
            zeros += values[i] == 0
            approximate += values[i]
        return zeros, approximate
    for i in range(first, last):
        zeros += values[i] == 0
        total += np.uint64(values[i])
    return zeros, np.float64(total)


@compiled
def _choose(values: Any, first: Any, last: Any, codes: Any) -> Any:
    """Put the cheaper coding of values[first:last] into codes [3] (kind or parameter, of runs, of others); returns room
    for it in bits."""
    n = last - first
    zeros, total = _sums(values, first, last)
    if zeros == n:
        codes[0] = ALL_ZERO
        return CODE_BITS
    codes[0] = _code_for(total / n)
    m, width, short = golomb(codes[0])
    if 2 * zeros < n:
        # Quotients add up to at most total / m; an escaped one takes at most a bit more than in unary, and ESCAPED_BITS.
        return CODE_BITS + n * (width + 2) + np.int64(min(total / m + 1, n * float(ESCAPED_BITS)))
    plain = CODE_BITS
    if width == 0:
        plain += n + np.int64(min(total, n * float(ESCAPED_BITS)))  # in unary, but for escapes
    else:
        for i in range(first, last):
            plain += _golomb_bits(np.uint64(values[i]), m, width, short)
    codes[1] = _code_for(zeros / (n - zeros + 1))
    codes[2] = _code_for((total - (n - zeros)) / (n - zeros))
    run_m, run_width, run_short = golomb(codes[1])
    other_m, other_width, other_short = golomb(codes[2])
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
    return plain + n


@compiled
def plan_classes(counts: Any, gaps: Any, sizes: Any, codes: Any) -> Any:
    """Choose the codes (int64 [256, 6]: three for gaps, three for sizes) of every class; returns room for all in bits.

    Args:
        counts: int64 [256], changes of each class.
        gaps, sizes: [k] grouped by class: unchanged elements passed; |step| − 1.
    """
    bits, first = 0, 0
    for c in range(CLASSES):
        if counts[c] > 0:
            last = first + counts[c]
            bits += 128 + counts[c]  # class and count, and a sign each
            bits += _choose(gaps, first, last, codes[c, :3]) + _choose(sizes, first, last, codes[c, 3:])
            first = last
    return bits


@compiled
def _put(words: Any, at: Any, value: Any, bits: Any) -> Any:
    """Append the low `bits` (0 to 64) of `value`, lowest first, above which it is 0; returns the position after them."""
    word, offset = at >> 6, np.uint64(at & 63)
    words[word] |= value << offset
    if offset + np.uint64(bits) > np.uint64(64):
        words[word + 1] |= value >> (np.uint64(64) - offset)
    return at + bits


@compiled
def _put_exp_golomb(words: Any, at: Any, x: Any, order: Any) -> Any:
    y = (x >> np.uint64(order)) + np.uint64(1)
    n = bit_length(y) - 1
    at = _put(words, at, (np.uint64(1) << np.uint64(n)) - np.uint64(1), n + 1)
    at = _put(words, at, y ^ (np.uint64(1) << np.uint64(n)), n)
    return _put(words, at, x & ((np.uint64(1) << np.uint64(order)) - np.uint64(1)), order)


@compiled
def _remainder(r: Any, width: Any, short: Any) -> Any:
    """Truncated binary of `r`: (bits, how many). Without a branch on which remainders are short: they come at random."""
    if width == 0:
        return np.uint64(0), 0
    long = np.uint64(r >= short)
    r += short * long
    return (r >> long) | ((r & long) << np.uint64(width - 1)), width - 1 + np.int64(long)


@compiled
def _put_golomb(words: Any, at: Any, x: Any, m: Any, width: Any, short: Any) -> Any:
    q = x // m
    if q < UNARY_LIMIT:
        at = _put(words, at, (np.uint64(1) << q) - np.uint64(1), np.int64(q) + 1)
    else:
        at = _put(words, at, (np.uint64(1) << np.uint64(UNARY_LIMIT)) - np.uint64(1), UNARY_LIMIT)
        at = _put_exp_golomb(words, at, q - np.uint64(UNARY_LIMIT), 0)
    bits, count = _remainder(x - q * m, width, short)
    return _put(words, at, bits, count)


@compiled
def _put_plain(words: Any, at: Any, values: Any, first: Any, last: Any, code: Any) -> Any:
    """Each of values[first:last] as by `_put_golomb`; the word that is being filled stays in a register."""
    m, width, short = golomb(code)
    inverse = 1 / m
    word, filled = at >> 6, np.uint64(at & 63)
    open_word = words[word]
    for i in range(first, last):
        x = np.uint64(values[i])
        q, r = _divide(x, m, inverse)
        if q < UNARY_LIMIT and width < 40:
            bits, count = _remainder(r, width, short)
            bits = (bits << (q + np.uint64(1))) | ((np.uint64(1) << q) - np.uint64(1))
            count += np.int64(q) + 1
            open_word |= bits << filled
            after = filled + np.uint64(count)
            if after >= np.uint64(64):
                words[word] = open_word
                word += 1
                open_word = bits >> (np.uint64(64) - filled) if filled else np.uint64(0)
                after -= np.uint64(64)
            filled = after
        else:
            words[word] = open_word
            at = _put_golomb(words, (word << 6) + np.int64(filled), x, m, width, short)
            word, filled = at >> 6, np.uint64(at & 63)
            open_word = words[word]
    words[word] = open_word
    return (word << 6) + np.int64(filled)


@compiled
def _put_numbers(words: Any, at: Any, values: Any, first: Any, last: Any, codes: Any) -> Any:
    at = _put(words, at, np.uint64(codes[0]), CODE_BITS)
    if codes[0] == ALL_ZERO:
        return at
    if codes[0] != ZERO_RUNS:
        return _put_plain(words, at, values, first, last, codes[0])
    at = _put(words, at, np.uint64(codes[1]), CODE_BITS)
    at = _put(words, at, np.uint64(codes[2]), CODE_BITS)
    run_m, run_width, run_short = golomb(codes[1])
    other_m, other_width, other_short = golomb(codes[2])
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
def _put_signs(words: Any, at: Any, steps: Any, first: Any, last: Any) -> Any:
    """A bit for each of steps[first:last], set if it is negative modulo 2^width."""
    top = np.uint64(8 * steps.itemsize - 1)
    for start in range(first, last, 64):
        n = min(64, last - start)
        signs = np.uint64(0)
        for j in range(n):
            signs |= (np.uint64(steps[start + j]) >> top) << np.uint64(j)
        at = _put(words, at, signs, n)
    return at


@compiled
def write_classes(words: Any, counts: Any, gaps: Any, steps: Any, sizes: Any, codes: Any) -> Any:
    """Write all classes into `words` (uint64 zeros, the room of `plan_classes` and a word more); returns their bits."""
    at, first, previous = 0, 0, -1
    for c in range(CLASSES):
        if counts[c] == 0:
            continue
        last = first + counts[c]
        at = _put_exp_golomb(words, at, np.uint64(c - previous - 1), 0)
        at = _put_exp_golomb(words, at, np.uint64(counts[c] - 1), COUNT_ORDER)
        at = _put_numbers(words, at, gaps, first, last, codes[c, :3])
        at = _put_numbers(words, at, sizes, first, last, codes[c, 3:])
        at = _put_signs(words, at, steps, first, last)
        first, previous = last, c
    return at
