"""What the delta codec needs to know of a dtype: its width, where its exponent lies, and the order of its values.

Invariant: `to_ordered` and `from_ordered` are inverse bijections of the bit patterns, so a step between two ordered
values (modulo 2^width) determines the new pattern from the old one, whatever it means as a number: −0.0, NaN payloads
and denormals included. Held by tests/property/test_delta_kernels.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.schemas.layout import DTYPE_BYTES

Bits = NDArray[Any]  # flat unsigned integers as wide as the tensor's dtype
UINT: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # by width
CLASSES = 256


@dataclass(frozen=True, slots=True)
class BitForm:
    """How the bits of a dtype are read. `code` stands for the dtype on the wire."""

    code: int
    width_bytes: int
    exponent_shift: int  # class of an element: (bits >> exponent_shift) & exponent_mask
    exponent_mask: int  # 0 for integers: one class
    is_float: bool

    @property
    def uint(self) -> type[np.unsignedinteger[Any]]:
        return UINT[self.width_bytes]

    @property
    def sign_bit(self) -> int:
        return 1 << (8 * self.width_bytes - 1)


def _float(code: int, width_bytes: int, mantissa_bits: int, exponent_bits: int) -> BitForm:
    # Of f64's 11 exponent bits the low 8 are enough: classes then mix only magnitudes 2**256 apart.
    return BitForm(code, width_bytes, mantissa_bits, (1 << min(exponent_bits, 8)) - 1, True)


def _integer(code: int, width_bytes: int) -> BitForm:
    return BitForm(code, width_bytes, 0, 0, False)


FORMS: dict[str, BitForm] = {
    "bf16": _float(0, 2, 7, 8),
    "f16": _float(1, 2, 10, 5),
    "f32": _float(2, 4, 23, 8),
    "f64": _float(3, 8, 52, 11),
    "f8_e4m3": _float(4, 1, 3, 4),
    "f8_e5m2": _float(5, 1, 2, 5),
    "i64": _integer(6, 8),
    "i32": _integer(7, 4),
    "i16": _integer(8, 2),
    "i8": _integer(9, 1),
    "u8": _integer(10, 1),
    "bool": _integer(11, 1),
}
DTYPE_OF_CODE = {form.code: dtype for dtype, form in FORMS.items()}
assert FORMS.keys() == DTYPE_BYTES.keys()


def uint_dtype(dtype: str) -> type[np.unsignedinteger[Any]]:
    """The unsigned integer as wide as layout dtype `dtype`."""
    return UINT[DTYPE_BYTES[dtype]]


def to_ordered(bits: Bits, form: BitForm) -> Bits:
    """`bits` [n] as unsigned integers in the order of the values they stand for (−NaN … −0, +0 … +NaN)."""
    if not form.is_float:
        return bits
    sign = form.uint(form.sign_bit)
    return np.where(bits & sign, ~bits, bits | sign)


def from_ordered(ordered: Bits, form: BitForm) -> Bits:
    """Inverse of `to_ordered`."""
    if not form.is_float:
        return ordered
    sign = form.uint(form.sign_bit)
    return np.where(ordered & sign, ordered ^ sign, ~ordered)
