"""Numba intrinsics for 64 elements at a time: what changed, what is of a class, as one 64-bit mask.

Invariant: bit j of a mask speaks of element i + j; the caller guarantees i + 64 <= size. LLVM turns each into the
machine's vector compare and mask move (AVX2, AVX-512, NEON), which a loop in Python syntax does not become. Held by
tests/property/test_delta_kernels.py.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 64
_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _load(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Elements [index, index + 64) as a vector; only the alignment of one element is assumed."""
    bits = array_type.dtype.bitwidth
    data = context.make_array(array_type)(context, builder, array).data
    vector = ir.VectorType(ir.IntType(bits), LANES)
    loaded = builder.load(builder.bitcast(builder.gep(data, [index]), vector.as_pointer()))
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
def class_mask(typing_context: Any, bits: Any, i: Any, field: Any, value: Any) -> Any:
    """uint64: for which of bits[i:i+64] `bits & field == value`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = _load(context, builder, signature.args[0], args[0], args[1])
        masked = builder.and_(x, _splat(builder, x.type, args[2]))
        return builder.bitcast(builder.icmp_unsigned("==", masked, _splat(builder, x.type, args[3])), _I64)

    return types.uint64(bits, types.intp, bits.dtype, bits.dtype), generate


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
