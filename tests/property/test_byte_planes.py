"""from_planes inverts to_planes, and the top plane of a float is its exponent."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from anabranch.kernels.byte_planes import BLOCK, from_planes, to_planes
from anabranch.kernels.delta_dtypes import FORMS
from tests.property.delta_strategies import DTYPES, bit_arrays


@given(st.sampled_from(DTYPES), st.sampled_from([0, 1, 7, 64, 1000, BLOCK + 3]), st.data())
def test_planes_are_inverted(dtype: str, n: int, data: st.DataObject) -> None:
    form = FORMS[dtype]
    bits = data.draw(bit_arrays(form, n))
    planes = np.empty((form.width_bytes, n), np.uint8)
    to_planes(bits, form, planes)
    out = np.empty_like(bits)
    from_planes(list(planes), form, out)
    assert np.array_equal(out, bits)


def _planes(values: list[int], dtype: str) -> list[list[int]]:
    form = FORMS[dtype]
    planes = np.empty((form.width_bytes, len(values)), np.uint8)
    to_planes(np.array(values, form.uint), form, planes)
    return planes.tolist()


def test_the_top_plane_is_the_exponent() -> None:
    assert _planes([0x3F80, 0xBF80, 0x0001, 0xFFFF], "bf16")[0] == [127, 127, 0, 255]  # 1.0, −1.0, a denormal, a NaN
    assert _planes([0x3F800000, 0xC0000000], "f32")[0] == [127, 128]  # 1.0, −2.0
    assert _planes([0x0102], "i16") == [[1], [2]]
