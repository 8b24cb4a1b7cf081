"""The fast kernels against the plain reference: the same bytes, the same changes."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.kernels import delta_reference as reference
from anabranch.kernels.delta_bits import parameter
from anabranch.kernels.delta_chunk import Piece, put_varint, read_head
from anabranch.kernels.delta_dtypes import FORMS, from_ordered, to_ordered
from anabranch.kernels.delta_locate import ClassCursors, _locate, locate
from anabranch.kernels.delta_scan import ClassCounts, scan, take_changes
from anabranch.kernels.delta_sparse import (
    Changes,
    Part,
    decode_sparse,
    encode_sparse,
    group_changes,
    read_changes,
    write_changes,
)
from anabranch.kernels.lanes import changed_mask, equal_mask, lowest_bit, nth_bit, popcount, put_classes
from anabranch.kernels.ordered import ordered, stepped
from anabranch.schemas.layout import Layout
from tests.property.delta_strategies import DTYPES, bit_arrays, changed, indices_of


@st.composite
def same_dtype_parts(draw: st.DrawFn) -> tuple[Layout, list[Part]]:
    """One to three changed tensors of one dtype, cut so that no further segments come of them."""
    dtype = draw(st.sampled_from(DTYPES))
    sizes = draw(st.lists(st.integers(1, 2000), min_size=1, max_size=3))
    layout = Layout.build([(f"t{i}", dtype, (n,)) for i, n in enumerate(sizes)])
    parts = []
    for i, n in enumerate(sizes):
        old = draw(bit_arrays(FORMS[dtype], n))
        new = draw(changed(FORMS[dtype], old))
        if (old != new).any():
            parts.append(Part(Piece(i, 0, n), old, new, *scan(old, new)))
    return layout, parts


@given(same_dtype_parts())
@settings(max_examples=300)
def test_chunks_have_the_bytes_of_the_reference_and_decode_alike(case: tuple[Layout, list[Part]]) -> None:
    layout, parts = case
    if not parts:
        return
    chunk = encode_sparse(layout, parts)
    head = read_head(layout, chunk)
    whole = {p.piece.tensor: p for p in parts}
    old = [whole[p.tensor].old[p.start : p.stop] for p in head.pieces]
    new = [whole[p.tensor].new[p.start : p.stop] for p in head.pieces]
    assert chunk == reference.encode_sparse(layout, head.pieces, old, new)
    fast = decode_sparse(head, chunk, lambda p: whole[p.tensor].old[p.start : p.stop])
    slow = reference.decode_sparse(head, chunk, old)
    assert [(p, i.tolist(), b.tolist()) for p, i, b in fast] == [(p, i, b.tolist()) for p, i, b in slow]


@given(st.sampled_from(DTYPES), st.integers(0, 1500), st.data())
@settings(max_examples=200)
def test_scan_finds_what_differs_as_bits(dtype: str, n: int, data: st.DataObject) -> None:
    old = data.draw(bit_arrays(FORMS[dtype], n))
    new = data.draw(changed(FORMS[dtype], old))
    words, count = scan(old, new)
    expected = np.flatnonzero(old != new).tolist()
    assert (indices_of(words).tolist(), count) == (expected, len(expected))
    assert words.size == -(-n // 64)


@given(st.sampled_from(DTYPES), st.lists(st.integers(1, 1200), min_size=1, max_size=3), st.data())
def test_gaps_count_the_class_from_piece_to_piece(dtype: str, sizes: list[int], data: st.DataObject) -> None:
    form = FORMS[dtype]
    seen = ClassCounts()
    passed: dict[int, int] = {}
    total: dict[int, int] = {}
    for n in sizes:
        old = data.draw(bit_arrays(form, n))
        new = data.draw(changed(form, old))
        words, count = scan(old, new)
        out = np.empty(count, np.uint8), np.empty(count, np.uint32), np.empty(count, form.uint)
        take_changes(old, new, words, form, seen, out)
        expected = []
        for i, c in enumerate(reference.classes_of(old, form).tolist()):
            total[c] = total.get(c, 0) + 1
            if old[i] != new[i]:
                expected.append((c, passed.get(c, 0)))
                passed[c] = 0
            else:
                passed[c] = passed.get(c, 0) + 1
        assert list(zip(out[0].tolist(), out[1].tolist(), strict=True)) == expected
        steps = (to_ordered(new, form) - to_ordered(old, form))[old != new]
        assert out[2].tolist() == steps.tolist()
    assert {c: n for c, n in enumerate(seen.passed.tolist()) if n} == total


@given(st.sampled_from(DTYPES), st.data())
def test_which_classes_are_compared_by_blocks_changes_nothing(dtype: str, data: st.DataObject) -> None:
    form = FORMS[dtype]
    old = data.draw(bit_arrays(form, 700))
    new = data.draw(changed(form, old))
    words, count = scan(old, new)
    layout = Layout.build([("a", dtype, (700,))])
    if not count:
        return
    changes = group_changes(layout, [Part(Piece(0, 0, 700), old, new, words, count)])
    every = np.unique(reference.classes_of(old, form)).astype(np.uint8)
    heavy = np.array(data.draw(st.lists(st.sampled_from(every.tolist()), unique=True)), np.uint8)
    cursors = ClassCursors(form, changes.counts, changes.gaps, changes.steps, 700)
    out = np.empty(count + 64, np.uint32)
    shift, mask = form.uint(form.exponent_shift), form.uint(form.exponent_mask)
    found = _locate(old, shift, mask, heavy, cursors.left, cursors.at, cursors.following, out)
    assert out[:found].tolist() == np.flatnonzero(old != new).tolist()


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50), st.data())
def test_locate_stays_inside_its_arguments_for_any_gaps(dtype: str, gaps: list[int], data: st.DataObject) -> None:
    form = FORMS[dtype]
    old = data.draw(bit_arrays(form, 1000))
    small = data.draw(st.booleans())
    each = np.array([g % 20 if small else g for g in gaps], np.uint32)
    counts = np.zeros(256, np.int64)
    for c in data.draw(st.lists(st.integers(0, form.exponent_mask), min_size=each.size, max_size=each.size)):
        counts[c] += 1
    cursors = ClassCursors(form, counts, each, np.ones(each.size, form.uint), old.size)
    indices, bits = locate(old, cursors, each.size)
    assert indices.size == bits.size <= each.size
    assert (np.diff(indices.astype(np.int64)) > 0).all()
    assert indices.size == 0 or indices[-1] < old.size


@given(st.sampled_from(DTYPES), st.data())
def test_steps_lead_from_any_pattern_to_any_other(dtype: str, data: st.DataObject) -> None:
    form = FORMS[dtype]
    old, new = data.draw(bit_arrays(form, 200)), data.draw(bit_arrays(form, 200))
    sign = form.uint(form.sign_bit if form.is_float else 0)
    steps = to_ordered(new, form) - to_ordered(old, form)
    high = int(np.iinfo(form.uint).max)
    assert [int(stepped(a, s, sign)) & high for a, s in zip(old, steps, strict=True)] == new.tolist()
    assert [int(ordered(a, sign)) & high for a in old] == to_ordered(old, form).tolist()
    assert from_ordered(to_ordered(old, form), form).tolist() == old.tolist()


@given(st.sampled_from(["bf16", "f8_e5m2", "i64"]), st.integers(1, 300), st.data())
def test_any_changes_pass_through_the_bit_stream(dtype: str, total: int, data: st.DataObject) -> None:
    """Also gaps and steps so long that quotients are escaped, in classes of any size."""
    form = FORMS[dtype]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    elements = data.draw(st.sampled_from([total, 1000, 2**25]))
    classes = np.sort(rng.integers(0, form.exponent_mask + 1, total))
    counts = np.bincount(classes, minlength=256).astype(np.int64)
    top = {"short": 3, "long": elements, "mixed": 0}[data.draw(st.sampled_from(["short", "long", "mixed"]))]
    gaps = rng.integers(0, top + 1, total) if top else (rng.pareto(0.3, total) * 2).clip(0, elements)
    gaps = np.minimum(gaps, elements).astype(np.uint32)
    steps = rng.integers(1, np.iinfo(form.uint).max, total, form.uint, endpoint=True)
    steps[rng.random(total) < data.draw(st.sampled_from([0.0, 0.9, 1.0]))] = 1
    changes = Changes(counts, gaps, steps)
    layout = Layout.build([("a", dtype, (elements,))])
    head = read_head(layout, bytes([1 << 4 | form.code, 1, 0]))
    stream = bytearray()
    put_varint(stream, total)
    read = read_changes(head, bytes([1 << 4 | form.code, 1, 0]) + bytes(stream) + write_changes(changes))
    assert np.array_equal(read.counts, counts)
    assert np.array_equal(read.gaps, gaps)
    assert np.array_equal(read.steps, steps)


def test_golomb_parameters_are_four_to_an_octave() -> None:
    assert [int(parameter(i)) for i in range(126)] == reference.PARAMETERS
    assert reference.PARAMETERS[:12] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]


@given(st.integers(1, 2**64 - 1), st.data())
def test_the_nth_bit(mask: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(0, mask.bit_count() - 1))
    places = [j for j in range(64) if mask >> j & 1]
    assert int(_nth(np.uint64(mask), np.uint64(n))) == 1 << places[n]


@numba.njit
def _nth(mask: Any, n: Any) -> Any:
    return nth_bit(mask, n)


@pytest.mark.parametrize("uint", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_masks_of_64_elements(uint: Any, offset: int) -> None:
    @numba.njit
    def masks(a: Any, b: Any, i: Any, shift: Any, mask: Any, value: Any, block: Any) -> Any:
        different = changed_mask(a, b, i)
        put_classes(a, i, shift, mask, block)
        return different, equal_mask(block, value), popcount(different), lowest_bit(different)

    rng = np.random.default_rng(offset)
    a = rng.integers(0, 256, 64 + offset).astype(uint)
    b = np.where(rng.random(a.size) < 0.3, a + uint(1), a)
    block = np.empty(64, np.uint8)
    different, member, count, lowest = masks(a, b, offset, uint(2), uint(7), np.uint8(3), block)
    where = [j for j in range(64) if a[offset + j] != b[offset + j]]
    assert different == sum(1 << j for j in where)
    assert block.tolist() == [int(x) >> 2 & 7 for x in a[offset:]]
    assert member == sum(1 << j for j in range(64) if int(a[offset + j]) >> 2 & 7 == 3)
    assert (count, lowest) == (len(where), where[0])
    assert masks(a, a, offset, uint(2), uint(7), np.uint8(3), block)[3] == 64
