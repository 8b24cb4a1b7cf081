"""Dense elements as byte planes: all highest bytes, then all next ones, down to the lowest.

A float's sign is moved behind its mantissa first (rotation by one bit), so that the highest plane of bf16 and f32 is
exactly the exponent: the plane in which trained weights are predictable. The others are close to noise.

Invariant: `from_planes` inverts `to_planes` for all bit patterns. Held by tests/property/test_byte_planes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.compiled import compiled
from anabranch.kernels.delta_dtypes import BitForm, Bits

BLOCK = 8192  # elements that stay in the cache from plane to plane


def to_planes(bits: Bits, form: BitForm, planes: NDArray[np.uint8]) -> None:
    """Fill `planes` uint8 [width, n] from `bits` [n]: plane 0 holds the highest byte of every element."""
    if form.width_bytes == 1:
        _rotate_bytes(bits, np.uint8(1 if form.is_float else 0), planes[0])
    elif form.width_bytes == 2:
        _split_pair(bits, form.is_float, planes[0], planes[1])
    else:
        _split(bits, form.is_float, planes)


def from_planes(planes: Sequence[NDArray[np.uint8]], form: BitForm, out: Bits) -> None:
    """Inverse of `to_planes`: `planes` are `width` arrays uint8 [n]; fills `out` [n]."""
    if form.width_bytes == 1:
        _rotate_bytes(planes[0], np.uint8(7 if form.is_float else 0), out)
    elif form.width_bytes == 2:
        _join_pair(planes[0], planes[1], form.is_float, out)
    else:
        out.fill(0)
        for p, plane in enumerate(planes):
            _or_plane(plane, out.dtype.type(8 * (form.width_bytes - 1 - p)), out)
        if form.is_float:
            _rotate_right(out)


@compiled
def _rotate_bytes(source: Any, left: Any, out: Any) -> None:
    right = (np.uint8(8) - left) & np.uint8(7)
    for i in range(source.size):
        out[i] = (source[i] << left) | (source[i] >> right)


@compiled
def _split_pair(bits: Any, rotate: Any, high: Any, low: Any) -> None:
    if rotate:
        for i in range(bits.size):
            x = bits[i]
            high[i] = x >> np.uint16(7)
            low[i] = (x << np.uint16(1)) | (x >> np.uint16(15))
    else:
        for i in range(bits.size):
            x = bits[i]
            high[i] = x >> np.uint16(8)
            low[i] = x


@compiled
def _join_pair(high: Any, low: Any, rotate: Any, out: Any) -> None:
    if rotate:
        for i in range(out.size):
            x = (np.uint16(high[i]) << np.uint16(8)) | np.uint16(low[i])
            out[i] = (x >> np.uint16(1)) | (x << np.uint16(15))
    else:
        for i in range(out.size):
            out[i] = (np.uint16(high[i]) << np.uint16(8)) | np.uint16(low[i])


@compiled
def _split(bits: Any, rotate: Any, planes: Any) -> None:
    one, top = bits.dtype.type(1), bits.dtype.type(8 * planes.shape[0] - 1)
    turned = np.empty(BLOCK, bits.dtype)
    for start in range(0, bits.size, BLOCK):
        size = min(BLOCK, bits.size - start)
        block = bits[start : start + size]
        if rotate:
            for i in range(size):
                turned[i] = (block[i] << one) | (block[i] >> top)
        else:
            for i in range(size):
                turned[i] = block[i]
        for p in range(planes.shape[0]):
            down = bits.dtype.type(8 * (planes.shape[0] - 1 - p))
            plane = planes[p, start : start + size]
            for i in range(size):
                plane[i] = turned[i] >> down


@compiled
def _or_plane(plane: Any, up: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] |= out.dtype.type(plane[i]) << up


@compiled
def _rotate_right(out: Any) -> None:
    one, top = out.dtype.type(1), out.dtype.type(8 * out.itemsize - 1)
    for i in range(out.size):
        x = out[i]
        out[i] = (x >> one) | (x << top)
