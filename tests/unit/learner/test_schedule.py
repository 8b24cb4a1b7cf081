import pytest

from anabranch.learner.schedule import learning_rate
from anabranch.schemas.config import LearnerSection


def rates(at: list[int], **learner: object) -> list[float]:
    return [learning_rate(step, LearnerSection(lr=0.8, **learner)) for step in at]  # type: ignore[arg-type]


def test_up_in_a_line_then_constant():
    assert rates([1, 2, 4, 5, 100], warmup_steps=4) == pytest.approx([0.2, 0.4, 0.8, 0.8, 0.8])
    assert rates([1, 100]) == [0.8, 0.8]


def test_down_in_a_line_to_its_end_and_no_further():
    got = rates([1, 2, 7, 12, 20], warmup_steps=2, steps=12, lr_schedule="linear", lr_end_ratio=0.5)
    assert got == pytest.approx([0.4, 0.8, 0.6, 0.4, 0.4])


def test_down_along_half_a_cosine():
    got = rates([5, 10, 15], steps=10, lr_schedule="cosine", lr_end_ratio=0.0)
    assert got == pytest.approx([0.4, 0.0, 0.0])


def test_a_warm_up_as_long_as_the_run_has_no_way_down():
    assert rates([3, 4, 5], warmup_steps=4, steps=4, lr_schedule="linear", lr_end_ratio=0.1) == pytest.approx(
        [0.6, 0.8, 0.08]
    )
