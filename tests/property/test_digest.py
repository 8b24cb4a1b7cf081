"""The fast digest against its definition in Python integers, and the algebra that publishers and followers build on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from anabranch.kernels.digest import (
    BLOCK_SEEDS,
    NOTHING,
    TABLE_SEEDS,
    Sums,
    add_sums,
    subtract_sums,
    sums_at,
    tensor_sums,
)

UINTS = [np.uint8, np.uint16, np.uint32, np.uint64]
FAR = 2**45  # of a start: far beyond what a 32-bit place could say


def splitmix64(seed: int, n: int) -> int:
    z = (seed + (n + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def key(lane: int, i: int) -> int:
    return (splitmix64(BLOCK_SEEDS[lane], i // 1024) | 1) * (splitmix64(TABLE_SEEDS[lane], i % 1024) | 1)


def defined(bits: np.ndarray, start: int = 0) -> Sums:
    """The sums as the definition has them: byte b of the tensor is byte b mod 4 of word b div 4."""
    first = start * bits.itemsize
    data = [(first + b, byte) for b, byte in enumerate(bits.tobytes()) if byte]
    lanes = (sum(key(lane, at // 4) * (byte << at % 4 * 8) for at, byte in data) % 2**64 for lane in (0, 1))
    return next(lanes), next(lanes)


def tensors(most: int = 40) -> Any:
    sizes = st.one_of(st.integers(0, most), st.sampled_from([1023, 1024, 1025, 4099]))
    return st.builds(lambda dtype, n: (dtype, n), st.sampled_from(UINTS), sizes).flatmap(
        lambda kind: arrays(kind[0], kind[1], elements=st.integers(0, int(np.iinfo(kind[0]).max)))
    )


starts = st.one_of(st.integers(0, 5), st.integers(1020, 1030), st.integers(0, FAR))


@given(tensors(), starts)
def test_the_fast_sums_are_those_of_the_definition(bits: np.ndarray, start: int) -> None:
    assert tensor_sums(bits, start) == defined(bits, start)


@given(tensors(), starts, st.data())
def test_the_sums_of_any_partition_add_up(bits: np.ndarray, start: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, bits.size), max_size=6)))
    total = NOTHING
    for a, b in zip([0, *cuts], [*cuts, bits.size], strict=True):
        total = add_sums(total, tensor_sums(bits[a:b], start + a))
    assert total == tensor_sums(bits, start)


@given(tensors(), st.data())
def test_elements_one_by_one_contribute_what_they_do_together(bits: np.ndarray, data: st.DataObject) -> None:
    """And in any order: a scatter over a tensor, part by part."""
    start = data.draw(starts)
    order = np.array(data.draw(st.permutations(range(bits.size))), np.int64)
    assert sums_at(order + start, bits[order]) == tensor_sums(bits, start)


@given(tensors(), st.data())
def test_an_update_by_what_changed_is_a_recount(bits: np.ndarray, data: st.DataObject) -> None:
    at = np.array(sorted(data.draw(st.sets(st.integers(0, max(bits.size - 1, 0)), max_size=bits.size))), np.int64)
    new = bits.copy()
    new[at] ^= data.draw(arrays(bits.dtype, at.size))
    moved = add_sums(subtract_sums(tensor_sums(bits), sums_at(at, bits[at])), sums_at(at, new[at]))
    assert moved == tensor_sums(new)


@pytest.mark.parametrize("dtype", UINTS)
@given(data=st.data())
def test_two_different_elements_that_change_places_are_noticed(dtype: Any, data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 3000))
    i, j = data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=2, unique=True))
    bits = np.random.default_rng(n).integers(0, int(np.iinfo(dtype).max), n, dtype, endpoint=True)
    swapped = bits.copy()
    swapped[[i, j]] = bits[[j, i]]
    assert (tensor_sums(swapped) == tensor_sums(bits)) == (bits[i] == bits[j])


@given(tensors(), starts, st.data())
def test_any_single_change_is_noticed_by_both_lanes(bits: np.ndarray, start: int, data: st.DataObject) -> None:
    if bits.size == 0:
        return
    at = data.draw(st.integers(0, bits.size - 1))
    changed = bits.copy()
    changed[at] ^= bits.dtype.type(1 << data.draw(st.integers(0, 8 * bits.itemsize - 1)))
    before, after = tensor_sums(bits, start), tensor_sums(changed, start)
    assert before[0] != after[0]
    assert before[1] != after[1]
