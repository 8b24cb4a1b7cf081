from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.schemas.errors import ManifestError
from anabranch.schemas.layout import ALIGNMENT_BYTES, DTYPE_BYTES, Layout, root_digest

SPECS = st.lists(
    st.tuples(
        st.text(max_size=8),
        st.sampled_from(sorted(DTYPE_BYTES)),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
    max_size=6,
    unique_by=lambda spec: spec[0],
)
TWO = [("b", "bf16", (3, 5)), ("a", "f32", (2,))]


@given(SPECS, st.randoms())
def test_the_order_given_does_not_matter(specs, random) -> None:
    shuffled = list(specs)
    random.shuffle(shuffled)
    assert Layout.build(shuffled) == Layout.build(specs)
    assert Layout.build(shuffled).hash == Layout.build(specs).hash


@given(SPECS)
def test_json_round_trip(specs) -> None:
    layout = Layout.build(specs)
    assert Layout.from_json(layout.to_json()) == layout
    assert Layout.from_json(layout.to_json().encode()).hash == layout.hash


@given(SPECS)
def test_tensors_are_aligned_and_do_not_overlap(specs) -> None:
    layout = Layout.build(specs)
    end = 0
    for tensor in layout.tensors:
        assert tensor.offset_bytes >= end
        assert tensor.offset_bytes % ALIGNMENT_BYTES == 0
        end = tensor.offset_bytes + tensor.size_bytes
    assert layout.mirror_bytes >= end
    assert layout.payload_bytes <= layout.mirror_bytes


def test_by_hand() -> None:
    layout = Layout.build(TWO)
    assert [(t.name, t.offset_bytes, t.size_bytes) for t in layout.tensors] == [("a", 0, 8), ("b", 64, 30)]
    assert (layout.payload_bytes, layout.mirror_bytes) == (38, 128)
    assert layout.by_name["b"].numel == 15
    assert Layout.build([]).mirror_bytes == 0


@pytest.mark.parametrize(
    "changed",
    [
        [("b", "bf16", (5, 3)), ("a", "f32", (2,))],
        [("b", "f16", (3, 5)), ("a", "f32", (2,))],
        [("c", "bf16", (3, 5)), ("a", "f32", (2,))],
        [("b", "bf16", (3, 5))],
    ],
)
def test_another_layout_has_another_hash(changed) -> None:
    assert Layout.build(changed).hash != Layout.build(TWO).hash


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([("a", "f32", (1,)), ("a", "f32", (1,))], "twice"),
        ([("a", "f32", (1,)), ("a", "bf16", (2, 2))], "twice"),
        ([("a", "float32", (1,))], "dtype"),
        ([("a", "f32", (-1,))], "shape"),
        ([("a", "f32", (1.5,))], "shape"),
        ([("a", "f32", (True,))], "shape"),
        ([("a", "f32", (2**40, 2**40))], "bytes"),
    ],
)
def test_impossible_layouts_are_refused(specs, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        Layout.build(specs)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(JSON)
def test_any_other_json_is_refused_by_name(tree: object) -> None:
    import json

    try:
        layout = Layout.from_json(json.dumps(tree))
    except ManifestError:
        return
    assert Layout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[[1]]", '[["a","f32",2]]', '[["a","f32",["2"]]]', '[["a","f32",[2],0]]', b"\xff", "[" * 100_000,
        '[["a","f32",[1]],["a","f32",["x"]]]', '[["a",["f32"],[1]]]', '["abc"]',
    ],
)  # fmt: skip
def test_text_that_is_no_layout_is_refused(text: str | bytes) -> None:
    with pytest.raises(ManifestError):
        Layout.from_json(text)


def test_the_root_digest_depends_on_layout_and_every_tensor() -> None:
    layout = Layout.build(TWO)
    digests = {"a": "0" * 32, "b": "1" * 32}
    root = root_digest(layout, digests)
    assert root_digest(layout, dict(reversed(digests.items()))) == root
    assert root_digest(layout, {"a": "1" * 32, "b": "0" * 32}) != root
    assert root_digest(Layout.build([("a", "f32", (3,)), TWO[0]]), digests) != root
