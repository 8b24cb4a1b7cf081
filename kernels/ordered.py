"""Steps between bit patterns in the order of the values they stand for, for compiled kernels.

Invariant: as kernels/delta_dtypes.py `to_ordered`/`from_ordered`, one element at a time; `sign` is the sign bit of the
dtype, 0 for integers. Held by tests/property/test_delta_kernels.py.
"""

from __future__ import annotations

from typing import Any

from anabranch.kernels.compiled import compiled


@compiled
def ordered(bits: Any, sign: Any) -> Any:
    """The place of `bits` in the order of values, as a number whose low bits (the dtype's width) count."""
    if sign == 0:
        return bits
    return ~bits if bits & sign else bits | sign


@compiled
def stepped(bits: Any, step: Any, sign: Any) -> Any:
    """The pattern `step` places after `bits` in the order of values; its low bits count."""
    if sign == 0:
        return bits + step
    there = ordered(bits, sign) + step
    return there ^ sign if there & sign else ~there


@compiled
def take_steps(old: Any, new: Any, indices: Any, sign: Any, out: Any) -> None:
    """out[t] = how many places new[indices[t]] comes after old[indices[t]], modulo 2^width."""
    for t in range(indices.size):
        i = indices[t]
        out[t] = ordered(new[i], sign) - ordered(old[i], sign)
