"""exp(x − top) of rows of float32, in one pass over memory: half of what torch takes for it on one thread.

Invariant: within 1.5 units in the last place of exp for x <= top, 0 below −87.3 (where float32 has no normal number left), and
NaN for NaN, as torch has it; what is not float32 on the CPU goes through torch. Held by
tests/unit/kernels/test_exponentials.py.

Cody and Waite's reduction by ln 2 in two parts and the polynomial of Cephes' expf, written so that it becomes vector
instructions: rounding by adding 1.5 · 2²³, which leaves the integer in the low bits, and no branch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from anabranch.kernels.compiled import compiled

THREADS = 2  # of torch, up to which one thread of ours is not slower
_f = np.float32
LOG2_E, ROUNDER, LN2_HIGH, LN2_LOW, LOWEST = (
    _f(1.44269504),
    _f(1.5 * 2**23),
    _f(0.693359375),
    _f(-2.12194440e-4),
    _f(-87.3),
)
C0, C1, C2, C3, C4, C5 = (
    _f(1.9875691500e-4), _f(1.3981999507e-3), _f(8.3334519073e-3), _f(4.1665795894e-2), _f(1.6666665459e-1), _f(0.5),
)  # fmt: skip
ZERO, ONE = _f(0), _f(1)
MANTISSA_BITS, ONE_BITS = np.int32(23), np.int32(127 << 23)


def exp_below(x: Tensor, top: Tensor, out: Tensor) -> None:
    """exp(x − top) into `out`; `out` may be x. Otherwise x − top is left in x.

    Args:
        x: [rows, columns], contiguous, as `out`; no element above `top` [rows] of its row, but by rounding.
    """
    if x.dtype != torch.float32 or x.device.type != "cpu" or torch.get_num_threads() > THREADS:
        torch.exp(x.sub_(top[:, None]), out=out)
    elif out is x:
        _in_place(x.numpy(), top.numpy())
    else:
        _beside(x.numpy(), top.numpy(), out.numpy())


@intrinsic  # type: ignore[untyped-decorator]
def _bits_of(typing_context: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _with_bits(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@partial(compiled, contract=True)
def _exp(d: Any) -> Any:
    """2ⁿ · p(d − n ln 2)"""
    rounded = d * LOG2_E + ROUNDER
    n = rounded - ROUNDER
    r = d - n * LN2_HIGH - n * LN2_LOW
    p = ((((C0 * r + C1) * r + C2) * r + C3) * r + C4) * r + C5
    scale = _with_bits((_bits_of(rounded) << MANTISSA_BITS) + ONE_BITS)
    value = (p * (r * r) + r + ONE) * scale
    return ZERO if d < LOWEST else value


@partial(compiled, contract=True)
def _in_place(x: Any, top: Any) -> None:
    for i in range(len(x)):
        row, most = x[i], top[i]
        for j in range(len(row)):
            row[j] = _exp(row[j] - most)


@partial(compiled, contract=True)
def _beside(x: Any, top: Any, out: Any) -> None:
    for i in range(len(x)):
        row, to, most = x[i], out[i], top[i]
        for j in range(len(row)):
            row[j] -= most
            to[j] = _exp(row[j])
