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


def to_planes(bits: Bits, form: BitForm) -> NDArray[np.uint8]:
    """uint8 [width, n] of `bits` [n]: plane 0 holds the highest byte of every element."""
    planes = np.empty((form.width_bytes, bits.size), np.uint8)
    _split(bits, form.is_float, planes)
    return planes


def from_planes(planes: Sequence[NDArray[np.uint8]], form: BitForm, out: Bits) -> None:
    """Inverse of `to_planes`: `planes` are `width` arrays uint8 [n]; fills `out` [n]."""
    if form.width_bytes == 2:
        _join_pair(planes[0], planes[1], form.is_float, out)
        return
    out.fill(0)
    for p, plane in enumerate(planes):
        _or_plane(plane, out.dtype.type(8 * (form.width_bytes - 1 - p)), out)
    if form.is_float:
        _rotate_right(out, out.dtype.type(8 * form.width_bytes - 1))


@compiled
def _split(bits: Any, rotate: Any, planes: Any) -> None:
    one, top = bits.dtype.type(1), bits.dtype.type(8 * planes.shape[0] - 1)
    for start in range(0, bits.size, BLOCK):
        end = min(start + BLOCK, bits.size)
        for p in range(planes.shape[0]):
            down = bits.dtype.type(8 * (planes.shape[0] - 1 - p))
            plane = planes[p]
            if rotate:
                for i in range(start, end):
                    x = bits[i]
                    x = bits.dtype.type(x << one) | bits.dtype.type(x >> top)
                    plane[i] = x >> down
            else:
                for i in range(start, end):
                    plane[i] = bits[i] >> down


@compiled
def _join_pair(high: Any, low: Any, rotate: Any, out: Any) -> None:
    for i in range(out.size):
        x = (np.uint16(high[i]) << np.uint16(8)) | np.uint16(low[i])
        out[i] = (x >> np.uint16(1)) | (x << np.uint16(15)) if rotate else x


@compiled
def _or_plane(plane: Any, up: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] |= out.dtype.type(plane[i]) << up


@compiled
def _rotate_right(out: Any, top: Any) -> None:
    one = out.dtype.type(1)
    for i in range(out.size):
        x = out[i]
        out[i] = out.dtype.type(x >> one) | out.dtype.type(x << top)
