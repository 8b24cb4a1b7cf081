"""Numba intrinsics for a block of 64 elements: what changed, what is of a class, as one 64-bit mask.

Invariant: bit j of a mask speaks of element i + j of the block; the caller guarantees i + 64 <= size. LLVM turns each into
the machine's vector compare and mask move (AVX2, AVX-512, NEON), which a loop in Python syntax does not become. Held by
tests/property/test_delta_kernels.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

from anabranch.kernels.compiled import compiled

LANES = 64
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_BYTES = ir.VectorType(ir.IntType(8), LANES)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


def _load(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Elements [index, index + 64) as a vector; only the alignment of one element is assumed."""
    bits = array_type.dtype.bitwidth
    vector = ir.VectorType(ir.IntType(bits), LANES)
    place = _pointer(context, builder, array_type, array, index)
    loaded = builder.load(builder.bitcast(place, vector.as_pointer()))
    loaded.align = bits // 8
    return loaded


def _splat(builder: Any, vector_type: Any, value: Any) -> Any:
    undefined = ir.Constant(vector_type, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))


@intrinsic  # type: ignore[untyped-decorator]
def changed_mask(typing_context: Any, old: Any, new: Any, i: Any) -> Any:
    """uint64: which of old[i:i+64] differ from new[i:i+64]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = _load(context, builder, signature.args[0], args[0], args[2])
        y = _load(context, builder, signature.args[1], args[1], args[2])
        return builder.bitcast(builder.icmp_unsigned("!=", x, y), _I64)

    return types.uint64(old, new, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def put_classes(typing_context: Any, bits: Any, i: Any, shift: Any, mask: Any, out: Any) -> Any:
    """Into `out` (uint8 [64]) the classes `(bits >> shift) & mask` of bits[i:i+64]; `shift`, `mask` of bits' dtype."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = _load(context, builder, signature.args[0], args[0], args[1])
        classes = builder.and_(builder.lshr(x, _splat(builder, x.type, args[2])), _splat(builder, x.type, args[3]))
        narrow = classes if x.type.element.width == 8 else builder.trunc(classes, _BYTES)
        place = _pointer(context, builder, signature.args[4], args[4], ir.Constant(_I64, 0))
        builder.store(narrow, builder.bitcast(place, _BYTES.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(bits, types.intp, bits.dtype, bits.dtype, out), generate


@intrinsic  # type: ignore[untyped-decorator]
def equal_mask(typing_context: Any, block: Any, value: Any) -> Any:
    """uint64: which of the 64 bytes of `block` (uint8 [64]) are `value`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = _load(context, builder, signature.args[0], args[0], ir.Constant(_I64, 0))
        return builder.bitcast(builder.icmp_unsigned("==", x, _splat(builder, x.type, args[1])), _I64)

    return types.uint64(block, types.uint8), generate


@intrinsic  # type: ignore[untyped-decorator]
def popcount(typing_context: Any, mask: Any) -> Any:
    """Set bits of a uint64, as int64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def lowest_bit(typing_context: Any, mask: Any) -> Any:
    """Position of the lowest set bit of a uint64, as int64; 64 if there is none."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


def _deposits_fast() -> bool:
    """Whether the processor that numba compiles for scatters bits by a mask (BMI2's pdep) in hardware; Zen 1 and 2 do it in microcode."""
    name = config.CPU_NAME or binding.get_host_cpu_name()
    if config.CPU_FEATURES is None:  # numba compiles for this machine
        able = bool(binding.get_host_cpu_features().get("bmi2"))
    else:
        able = "+bmi2" in config.CPU_FEATURES.split(",")
    return able and name not in ("znver1", "znver2")


if _deposits_fast():

    @intrinsic  # type: ignore[untyped-decorator]
    def nth_bit(typing_context: Any, mask: Any, n: Any) -> Any:
        """The set bit of a uint64 that has `n` (uint64) set bits below it, alone in a uint64; there must be one."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(_I64, [_I64, _I64])
            deposit = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.bmi.pdep.64")
            return builder.call(deposit, [builder.shl(ir.Constant(_I64, 1), args[1]), args[0]])

        return types.uint64(types.uint64, types.uint64), generate

else:

    @compiled
    def nth_bit(mask: Any, n: Any) -> Any:
        """The set bit of a uint64 that has `n` (uint64) set bits below it, alone in a uint64; there must be one."""
        for _ in range(n):
            mask &= mask - np.uint64(1)
        return mask & (np.uint64(0) - mask)
