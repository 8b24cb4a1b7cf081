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
    planes = to_planes(bits, form)
    assert planes.shape == (form.width_bytes, n)
    out = np.empty_like(bits)
    from_planes(list(planes), form, out)
    assert np.array_equal(out, bits)


def test_the_top_plane_is_the_exponent() -> None:
    bf16 = np.array([0x3F80, 0xBF80, 0x0001, 0xFFFF], np.uint16)  # 1.0, −1.0, a denormal, a NaN
    assert to_planes(bf16, FORMS["bf16"])[0].tolist() == [127, 127, 0, 255]
    f32 = np.array([0x3F800000, 0xC0000000], np.uint32)  # 1.0, −2.0
    assert to_planes(f32, FORMS["f32"])[0].tolist() == [127, 128]
    assert to_planes(np.array([0x0102], np.uint16), FORMS["i16"]).tolist() == [[1], [2]]
