import numpy as np
import pytest

from anabranch.kernels.segments import Stretch, dense_mask, stretches
from tests.unit.kernels.segment_samples import row


def test_a_child_sees_its_parent_and_itself_and_nothing_else():
    segments, length = row((2, [2, 1]), 2)
    assert dense_mask(segments, length).int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 1],
    ]
    assert sum(s.pairs for s in stretches(segments, length)) == int(dense_mask(segments, length).sum())


def test_segments_may_stand_in_any_order():
    assert stretches(np.array([[3, 2, 1], [0, 3, -1]]), 5) == [Stretch(3, 2, 0, 3), Stretch(0, 3)]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([[0, 2, -1], [1, 2, -1]], "cover the row once"),
        ([[0, 2, -1], [3, 1, -1]], "cover the row once"),
        ([[0, 4, -1], [4, 0, 0]], "cover the row once"),
        ([[0, 3, -1]], "cover 3 of 4"),
        ([[0, 2, -1], [2, 1, 0], [3, 1, 1]], "not a segment without parent"),
        ([[0, 2, -1], [2, 2, 5]], "not a segment without parent"),
        ([[0, 2, -1], [2, 2, 1]], "not a segment without parent"),
    ],
)
def test_segments_that_do_not_make_a_row_are_refused(segments, message):
    with pytest.raises(ValueError, match=message):
        stretches(np.array(segments), 4)
