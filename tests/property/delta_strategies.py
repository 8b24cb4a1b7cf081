"""Pairs of states for property tests of the delta codec: every dtype, every kind of bit pattern, every density."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from anabranch.kernels.delta_dtypes import FORMS, BitForm, Bits
from anabranch.schemas.layout import Layout

DTYPES = sorted(FORMS)


def indices_of(words: Any) -> Any:
    """The elements that `scan` marked (uint64 words), ascending."""
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).astype(np.uint32)


def special_patterns(form: BitForm) -> list[int]:
    """±0, the smallest denormals, exponent boundaries, infinities, NaNs with payloads, of a dtype."""
    width, mantissa = 8 * form.width_bytes, form.exponent_shift
    if not form.is_float:
        return [0, 1, (1 << width) - 1, 1 << (width - 1)]
    top = form.sign_bit - (1 << mantissa)  # all exponent bits set
    positive = [
        0,
        1,
        2,
        (1 << mantissa) - 1,
        1 << mantissa,
        (1 << mantissa) + 1,
        top - 1,
        top,
        top + 1,
        form.sign_bit - 1,
    ]
    return positive + [p | form.sign_bit for p in positive]


@st.composite
def bit_arrays(draw: st.DrawFn, form: BitForm, size: int) -> Bits:
    """Like weights (a few exponents), or any patterns at all, with special patterns strewn in."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    high = np.iinfo(form.uint).max
    bits = rng.integers(0, high, size, form.uint, endpoint=True)
    if form.is_float and draw(st.booleans()):
        spread = draw(st.sampled_from([0.02, 1.0]))
        exponent = np.clip(rng.normal(form.exponent_mask * 0.45, spread * 3, size), 0, form.exponent_mask).astype(
            form.uint
        )
        keep = form.uint(high ^ (form.exponent_mask << form.exponent_shift))
        bits = (bits & keep) | (exponent << form.uint(form.exponent_shift))
    if size:
        where = rng.random(size) < draw(st.sampled_from([0.0, 0.05]))
        bits[where] = rng.choice(np.array(special_patterns(form), form.uint), int(where.sum()))
    return bits


@st.composite
def changed(draw: st.DrawFn, form: BitForm, bits: Bits) -> Bits:
    """`bits` after a step: none, one, some or all elements, by ±1, by little, or to anything."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    density = draw(st.sampled_from([0.0, "one", 0.001, 0.03, 0.5, 1.0]))
    if density == "one":
        where = np.arange(bits.size) == (int(rng.integers(bits.size)) if bits.size else 0)
    else:
        where = rng.random(bits.size) < density
    if draw(st.booleans()):  # only a stretch of it: the rest is cut out of the segments
        first, last = sorted(rng.integers(0, bits.size + 1, 2))
        where &= (np.arange(bits.size) >= first) & (np.arange(bits.size) < last)
    how = draw(st.sampled_from(["unit", "small", "any", "special"]))
    n = int(where.sum())
    new = bits.copy()
    if how == "unit":
        new[where] += rng.choice(np.array([1, np.iinfo(form.uint).max], form.uint), n)
    elif how == "small":
        new[where] += rng.geometric(0.2, n).astype(form.uint)
    elif how == "any":
        new[where] = rng.integers(0, np.iinfo(form.uint).max, n, form.uint, endpoint=True)
    else:
        new[where] = rng.choice(np.array(special_patterns(form), form.uint), n)
    return new


@st.composite
def state_pairs(draw: st.DrawFn, max_size: int = 3000) -> tuple[Layout, dict[str, Any], dict[str, Any]]:
    """(layout, base, new): several tensors, scalars and empty ones among them, of one or several dtypes."""
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
    shapes = st.one_of(
        hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=12),
        st.integers(0, max_size).map(lambda n: (n,)),
    )
    specs = draw(st.lists(st.tuples(st.sampled_from(dtypes), shapes), min_size=1, max_size=4))
    layout = Layout.build([(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(specs)])
    base = {t.name: draw(bit_arrays(FORMS[t.dtype], t.numel)) for t in layout.tensors}
    new = {t.name: draw(changed(FORMS[t.dtype], base[t.name])) for t in layout.tensors}
    return layout, base, new
