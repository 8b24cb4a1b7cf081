"""Segments computed in calls of like shape against the dense mask of the whole row."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.kernels import segment_attention
from anabranch.kernels.segment_attention import SegmentPlan
from anabranch.kernels.segments import reference_attention
from tests.unit.kernels.segment_samples import PARTS, ROWS, gradients, qkv, row


def assert_equal_to_reference(segments: np.ndarray, length: int, **kwargs: object) -> None:
    inputs = qkv(length, **kwargs)
    ours = SegmentPlan.of(segments, length).attend(*inputs, scale=0.3)
    theirs = reference_attention(*inputs, segments, scale=0.3)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    for mine, other in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-11, rtol=0)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_values_and_gradients_are_those_of_the_dense_mask(name, heads, kv_heads):
    assert_equal_to_reference(*ROWS[name], heads=heads, kv_heads=kv_heads)


@settings(max_examples=60, deadline=None)
@given(PARTS, st.sampled_from([0, 40, 2**13]))
def test_so_they_are_for_any_row_and_however_calls_are_shared(parts, call_pairs):
    before, segment_attention.CALL_PAIRS = segment_attention.CALL_PAIRS, call_pairs
    try:
        assert_equal_to_reference(*row(*parts))
    finally:
        segment_attention.CALL_PAIRS = before


def test_finite_differences():
    segments, length = row((3, [2, 1]), 2, (1, [2]))
    plan = SegmentPlan.of(segments, length)
    inputs = qkv(length, heads=2, kv_heads=1, width=2)
    assert torch.autograd.gradcheck(lambda q, k, v: plan.attend(q, k, v), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_segments_have_no_influence_not_even_on_rounding(dtype):
    segments, length = row((30, [7, 9, 5]), 22, 19, (31, [6, 3]))
    plan = SegmentPlan.of(segments, length)
    inputs = [x.detach() for x in qkv(length, dtype=dtype)]
    before = plan.attend(*inputs)
    start, size, _ = segments[5].tolist()
    for x in inputs:
        x[:, :, start : start + size] += 1
    after = plan.attend(*inputs)
    changed = (before != after).any(dim=3)[0].any(dim=0)
    assert torch.nonzero(changed).squeeze(1).tolist() == list(range(start, start + size))


def test_what_is_no_number_stays_in_its_segment():
    segments, length = row(9, (3, [5, 2]), (7, [4]), 6)
    inputs = [x.detach() for x in qkv(length)]
    for x in inputs:
        x[:, :, 0] = torch.nan  # where padding might be taken from
    found = SegmentPlan.of(segments, length).attend(*inputs).isnan().any(dim=3)[0].any(dim=0)
    assert torch.nonzero(found).squeeze(1).tolist() == list(range(9))


def test_the_same_row_gives_the_same_bits_with_several_threads():
    segments, length = row(*[(40, [int(n) for n in np.random.default_rng(i).integers(5, 30, 8)]) for i in range(4)])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        runs = []
        for _ in range(3):
            inputs = qkv(length, dtype=torch.float32)
            runs.append(gradients(SegmentPlan.of(segments, length).attend(*inputs), inputs))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


def test_segments_of_like_length_share_a_call_and_very_different_ones_do_not():
    assert len(SegmentPlan.of(*row(20, 22, 19, 20)).blocks) == 1
    assert len(SegmentPlan.of(*row(20, 22, 900, 905)).blocks) == 2
    group = SegmentPlan.of(*row((300, [40] * 8)))
    assert len(group.blocks) == 2  # the prompt, and all of its children
    assert group.computed_pairs < 1.1 * group.pairs


def test_a_row_of_another_length_is_refused():
    plan = SegmentPlan.of(*row(4, 3))
    with pytest.raises(ValueError, match="one row of 7"):
        plan.attend(*qkv(8))
