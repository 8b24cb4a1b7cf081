"""Digests of tensors that add up: the unit from which `schemas.layout.root_digest` builds a model's digest.

A tensor's bytes (little-endian, row by row, filled up with zeros to whole words) are words w_0, w_1, ... of 32 bits. Its digest is
two sums over them, lane L of 0 and 1, modulo 2^64:

    sum_L = Σ_i key_L(i) · w_i,    key_L(i) = block_key_L(⌊i / 1024⌋) · table_L[i mod 1024]

with fixed odd keys (below). An element of 2 bytes is half a word, and its part of the word counts by itself. So the sums of
any partition of a tensor add up to those of the whole: ranks that hold a share each never gather it. And a change of K
elements moves the sums by those of the new elements less those of the old: a step costs what it changed, not a pass over the model.

Invariant: the digest depends on the bytes and their places alone, not on how a tensor was cut up, on the number of threads
or on the machine. dtype and shape (so also how many zeros it ends in) are bound by the layout, not here. Held by
tests/property/test_digest.py and tests/unit/kernels/test_digest.py.

What it is good for. It is there to find accidents: a wrong base, a missed or doubled chunk, a scatter gone astray. Sums
of key · word are the multilinear family (Lemire and Kaser 2014, "Strongly universal string hashing is fast"). A single
changed word is always noticed, since an odd key cannot make a difference vanish. Two states that differ in several
words have the same digest with probability about 2^−(126 − 2v), if 2^v divides all differences of words: low bits that are
zero in all of them are lost to the product, and the lowest bit of an odd key says nothing. Steps of training have v = 0. In
the worst case nothing differs but the signs of several f32, or of bf16 at odd indices: v = 31, which leaves 64 bits.

What it is not good for. The keys are public and the sums are linear, so whoever wants two states with one digest can
compute them. Authenticity comes from elsewhere: a signed manifest over the BLAKE3 digests of its chunks.

Keys. splitmix64 of seed s gives z_n = mix(s + (n + 1)·γ), n = 0, 1, ...; table_L[r] = z_r | 1 of seed TABLE_SEEDS[L] and
block_key_L(j) = z_j | 1 of seed BLOCK_SEEDS[L]. The four seeds are the first 256 bits of π's fraction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.compiled import compiled
from anabranch.kernels.delta_dtypes import Bits
from anabranch.kernels.workers import Workers

Sums = tuple[int, int]  # two lanes, each in [0, 2^64)

BLOCK = 1024  # the table of both lanes, 16 KiB, stays in the first cache beside the elements
TABLE_SEEDS = 0x243F6A8885A308D3, 0x13198A2E03707344
BLOCK_SEEDS = 0xA4093822299F31D0, 0x082EFA98EC4E6C89
NOTHING: Sums = 0, 0

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_A, _MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)
_ONE, _BLOCK_BITS, _ROW_MASK = np.uint64(1), np.uint64(BLOCK.bit_length() - 1), np.uint64(BLOCK - 1)
_LOW = np.uint64(2**32 - 1)
_MASK = 2**64 - 1
_SHARE = 2**20  # words that are worth waking another thread for


def tensor_digest(bits: Bits) -> str:
    """Digest of a whole tensor, 32 hex digits; see `tensor_sums` for `bits` and what is raised."""
    return digest_of_sums(tensor_sums(bits))


def tensor_sums(bits: Bits, start: int = 0, workers: Workers | None = None) -> Sums:
    """What `bits` [n], elements [start, start + n) of a tensor, contribute to its digest.

    Args:
        bits: unsigned integers as wide as the tensor's dtype; C-contiguous, taken flat.
        start: index in the tensor of the first.
        workers: threads to share a large array among.

    Raises:
        ValueError: `bits` are of another dtype or not C-contiguous, or `start` is negative.
    """
    flat = _flat(bits)
    if start < 0:
        raise ValueError(f"a piece of a tensor starts at element {start}")
    data, at = flat.view(np.uint8), start * flat.dtype.itemsize  # bytes, and the place in the tensor of the first
    head = min(-at % 4, data.size)
    tail = (data.size - head) % 4
    words = data[head : data.size - tail].view(np.uint32)
    sums = _sum_shared(words, (at + head) // 4, workers)
    if head:
        sums = add_sums(sums, _part_of_word(data[:head], at))
    if tail:
        sums = add_sums(sums, _part_of_word(data[data.size - tail :], at + data.size - tail))
    return sums


def sums_at(indices: NDArray[np.int64], bits: Bits) -> Sums:
    """What the elements at flat `indices` int64 [K], whose bits are `bits` [K], contribute.

    The sums of a state after K changes are add_sums(subtract_sums(sums, sums_at(at, old)), sums_at(at, new)).

    Raises:
        ValueError: as `tensor_sums`; not one index for every element, or a negative one.
    """
    flat = _flat(bits)
    if indices.dtype != np.int64 or indices.shape != flat.shape:
        raise ValueError(f"indices {indices.dtype} {list(indices.shape)} for {flat.size} elements")
    if indices.size and indices.min() < 0:
        raise ValueError(f"element {indices.min()} of a tensor")
    return _lanes(_sum_elements(np.ascontiguousarray(indices), flat, flat.dtype.itemsize, _TABLES, _SEEDS))


def add_sums(a: Sums, b: Sums) -> Sums:
    """Sums of two disjoint sets of elements together."""
    return (a[0] + b[0]) & _MASK, (a[1] + b[1]) & _MASK


def subtract_sums(a: Sums, b: Sums) -> Sums:
    """Sums of the elements of `a` without those of `b`."""
    return (a[0] - b[0]) & _MASK, (a[1] - b[1]) & _MASK


def digest_of_sums(sums: Sums) -> str:
    """32 hex digits: lane 0, then lane 1, each with its highest digit first."""
    return f"{sums[0]:016x}{sums[1]:016x}"


def _flat(bits: Bits) -> NDArray[Any]:
    if bits.dtype.kind != "u" or not bits.dtype.isnative:
        raise ValueError(f"a digest is taken of unsigned integers, not of {bits.dtype}")
    if not bits.flags.c_contiguous:
        raise ValueError("a digest needs a C-contiguous array")
    return bits.reshape(-1)


def _sum_shared(words: NDArray[np.uint32], first: int, workers: Workers | None) -> Sums:
    if workers is None or workers.threads == 1 or words.size < 2 * _SHARE:
        return _lanes(_sum_words(words, first, _TABLES, _SEEDS))
    total = NOTHING
    shares = ((first + at, words[at : at + _SHARE]) for at in range(0, words.size, _SHARE))
    for sums in workers.in_order(lambda share: _sum_words(share[1], share[0], _TABLES, _SEEDS), shares):
        total = add_sums(total, _lanes(sums))
    return total


def _part_of_word(data: NDArray[np.uint8], at: int) -> Sums:
    """Sums of fewer than four bytes of one word, the first of which is byte `at` of the tensor."""
    word = np.zeros(4, np.uint8)
    word[at % 4 : at % 4 + data.size] = data
    return _lanes(_sum_words(word.view(np.uint32), at // 4, _TABLES, _SEEDS))


def _lanes(sums: Any) -> Sums:
    return int(sums[0]), int(sums[1])


def _splitmix64(seed: Any, n: Any) -> Any:
    """The n-th output (from 0) of splitmix64 with `seed`; all uint64."""
    z = seed + (n + _ONE) * _GAMMA
    z = (z ^ (z >> _S30)) * _MIX_A
    z = (z ^ (z >> _S27)) * _MIX_B
    return z ^ (z >> _S31)


_key = compiled(_splitmix64)


@compiled
def _sum_words(words: Any, first: Any, tables: Any, seeds: Any) -> Any:
    """Both lanes' sums of `words` [n], the first of which is at place `first`."""
    sum0, sum1 = np.uint64(0), np.uint64(0)
    at, row, block = 0, first % BLOCK, np.uint64(first // BLOCK)
    while at < words.size:
        size = min(BLOCK - row, words.size - at)
        part = words[at : at + size]
        keys0, keys1 = tables[0, row : row + size], tables[1, row : row + size]
        # 32-bit halves: each product fits 64 bits, which vector units have a multiplication for
        a0, b0, a1, b1 = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
        for i in range(size):
            word = np.uint64(part[i])
            a0 += word * (keys0[i] & _LOW)
            b0 += word * (keys0[i] >> _S32)
            a1 += word * (keys1[i] & _LOW)
            b1 += word * (keys1[i] >> _S32)
        sum0 += (a0 + (b0 << _S32)) * (_key(seeds[0], block) | _ONE)
        sum1 += (a1 + (b1 << _S32)) * (_key(seeds[1], block) | _ONE)
        at += size
        row = 0
        block += _ONE
    return sum0, sum1


@compiled
def _sum_elements(indices: Any, bits: Any, width: Any, tables: Any, seeds: Any) -> Any:
    """Both lanes' sums of the elements, of `width` bytes each, at `indices`."""
    sum0, sum1 = np.uint64(0), np.uint64(0)
    known, key0, key1 = np.uint64(2**63), np.uint64(0), np.uint64(0)  # keys of the block we were in last
    for k in range(indices.size):
        at = np.uint64(indices[k]) * np.uint64(width)
        place = at >> np.uint64(2)
        rest = np.uint64(bits[k]) << ((at & np.uint64(3)) << np.uint64(3))
        for _ in range(2 if width == 8 else 1):
            block, row = place >> _BLOCK_BITS, place & _ROW_MASK
            if block != known:
                known = block
                key0, key1 = _key(seeds[0], block) | _ONE, _key(seeds[1], block) | _ONE
            word = rest & _LOW
            sum0 += word * tables[0, row] * key0
            sum1 += word * tables[1, row] * key1
            place += _ONE
            rest >>= _S32
    return sum0, sum1


# uint64 [2, BLOCK]
_TABLES = np.stack([_splitmix64(np.uint64(seed), np.arange(BLOCK, dtype=np.uint64)) | _ONE for seed in TABLE_SEEDS])
_SEEDS = np.array(BLOCK_SEEDS, np.uint64)
