"""Sets of elements as intervals, held against sets of numbers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from anabranch.deploy.delta_spans import Line, OwnedSpans, Spans, union
from anabranch.kernels.delta_chunk import Piece
from anabranch.schemas.layout import Layout

LAYOUT = Layout.build([("a", "bf16", (5,)), ("b", "u8", (0,)), ("c", "f32", (2, 2)), ("d", "u8", (0, 3)), ("e", "u8", (1,))])  # fmt: skip
LINE = Line(LAYOUT)
SIZE = 60


def spans(*intervals: tuple[int, int]) -> Spans:
    return Spans(np.array([a for a, _ in intervals], np.int64), np.array([b for _, b in intervals], np.int64))


def elements(of: Spans) -> set[int]:
    assert (of.starts < of.stops).all()
    assert (of.stops[:-1] <= of.starts[1:]).all()
    return {place for a, b in zip(of.starts, of.stops, strict=True) for place in range(a, b)}


def random_owners(rng: np.random.Generator, owners: int) -> list[Spans]:
    """Disjoint, with elements that nobody has."""
    owner = rng.integers(-1, owners, SIZE)
    cuts = np.flatnonzero(np.diff(owner, prepend=-2, append=-2))
    owned = [(int(a), int(b), int(owner[a])) for a, b in pairwise(cuts)]
    return [spans(*((a, b) for a, b, o in owned if o == number)) for number in range(owners)]


def test_a_line_is_all_tensors_one_after_another() -> None:
    assert LINE.elements == 10
    pieces = [Piece(0, 1, 5), Piece(2, 0, 4), Piece(4, 0, 1)]
    line = LINE.spans(pieces)
    assert (list(line.starts), list(line.stops)) == ([1, 5, 9], [5, 9, 10])
    assert LINE.pieces(line) == pieces
    assert LINE.pieces(union(line)) == pieces, "a piece ends where its tensor does"
    assert [LINE.name(place) for place in (0, 4, 5, 8, 9)] == ["a", "a", "c", "c", "e"]
    assert LINE.pieces(LINE.spans([])) == []


def test_pieces_that_touch_become_one() -> None:
    assert LINE.pieces(union(LINE.spans([Piece(0, 0, 2)]), LINE.spans([Piece(0, 2, 4)]))) == [Piece(0, 0, 4)]
    assert LINE.pieces(union(LINE.spans([Piece(0, 0, 2)]), LINE.spans([Piece(0, 3, 4)]))) == [
        Piece(0, 0, 2),
        Piece(0, 3, 4),
    ]


@pytest.mark.parametrize("seed", range(30))
def test_sets_of_numbers_say_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    each = random_owners(rng, owners=5)
    owned = OwnedSpans(each)
    assert len(owned) == 5
    assert owned.shared() is None
    assert list(owned.elements) == [one.elements for one in each] == [len(elements(one)) for one in each]
    assert list(owned.intervals) == [len(one) for one in each]
    for _ in range(20):
        wanted = random_owners(rng, owners=2)[0]
        over = owned.over(wanted)
        assert list(over) == [n for n, one in enumerate(each) if elements(one) & elements(wanted)]
        assert elements(owned.of(over)) == set().union(*(elements(each[n]) for n in over))
        both = union(wanted, each[0])
        assert elements(both) == elements(wanted) | elements(each[0])
        assert len(both) == 0 or (both.stops[:-1] < both.starts[1:]).all(), "in as few as possible"


@pytest.mark.parametrize(
    ("owners", "shared"),
    [
        ([[(0, 5)], [(5, 9)]], None),
        ([[(0, 5)], [(4, 9)]], (0, 1, 4)),
        ([[(3, 9)], [(0, 4)]], (1, 0, 3)),
        ([[(0, 9)], [(2, 3)]], (0, 1, 2)),
        ([[(7, 8)], [(1, 2)], [(7, 8)]], (0, 2, 7)),
        ([[], []], None),
        ([], None),
    ],
)
def test_what_two_owners_share(owners: list[list[tuple[int, int]]], shared: tuple[int, int, int] | None) -> None:
    assert OwnedSpans(spans(*each) for each in owners).shared() == shared
