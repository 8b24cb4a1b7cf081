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
