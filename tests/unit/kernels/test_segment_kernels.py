"""Flex attention runs on the CPU uncompiled. Flash attention does not: its stand-in has the meaning of its arguments."""

import pytest
import torch
from hypothesis import given, settings
from torch.nn.attention import flex_attention as flex

from anabranch.kernels import segment_kernels
from anabranch.kernels.segment_kernels import FlashPlan, FlexPlan
from anabranch.kernels.segments import dense_mask, reference_attention
from tests.unit.kernels.segment_samples import PARTS, ROWS, gradients, qkv, row


def varlen(q, k, v, query_ends, key_ends, longest_q, longest_k, *, dropout_p, softmax_scale, causal):
    """`flash_attn_varlen_func`: sequences one after the other, causal from the last query and key."""
    assert causal
    assert not dropout_p
    assert {query_ends.dtype, key_ends.dtype} == {torch.int32}
    parts = []
    for i in range(len(query_ends) - 1):
        mine, theirs = slice(*query_ends[i : i + 2].tolist()), slice(*key_ends[i : i + 2].tolist())
        sizes = mine.stop - mine.start, theirs.stop - theirs.start
        assert sizes[0] <= longest_q
        assert sizes[1] <= longest_k
        mask = torch.ones(sizes, dtype=torch.bool).tril(sizes[1] - sizes[0])
        scores = torch.einsum("qhd,khd->hqk", q[mine], k[theirs].repeat_interleave(q.shape[1] // k.shape[1], 1))
        weights = (scores * softmax_scale).masked_fill(~mask, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v[theirs].repeat_interleave(q.shape[1] // v.shape[1], 1)))
    return torch.cat(parts)


@pytest.mark.parametrize("name", ROWS)
def test_flash_attention_is_told_the_segments(name):
    segments, length = ROWS[name]
    # Segments in another order than that of the row: it must be undone.
    for given_order in (segments, segments_reversed(segments)):
        inputs = qkv(length)
        ours = FlashPlan.of(given_order, length, "cpu", varlen).attend(*inputs, scale=0.3)
        theirs = reference_attention(*inputs, segments, scale=0.3)
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
        for mine, other in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
            torch.testing.assert_close(mine, other, atol=1e-11, rtol=0)


def segments_reversed(segments):
    turned = segments[::-1].copy()
    turned[:, 2] = [-1 if parent < 0 else len(segments) - 1 - parent for parent in turned[:, 2]]
    return turned


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ROWS)
def test_flex_attention_is_told_the_segments(name, monkeypatch):
    segments, length = ROWS[name]
    inputs = qkv(length, dtype=torch.float32, width=16)
    # The CPU is declared for inference only; what it computes uncompiled has a gradient all the same.
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    ours = FlexPlan.of(segments, length).attend(*inputs, scale=0.3)
    theirs = reference_attention(*inputs, segments, scale=0.3)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    for mine, other in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=0)


@settings(max_examples=40, deadline=None)
@given(PARTS)
def test_the_blocks_of_flex_attention_are_those_with_a_wanted_pair(parts):
    segments, length = row(*parts)
    before, segment_kernels.FLEX_BLOCK = segment_kernels.FLEX_BLOCK, 4
    try:
        plan = FlexPlan.of(segments, length)
    finally:
        segment_kernels.FLEX_BLOCK = before
    wanted = torch.nn.functional.pad(dense_mask(segments, length), (0, -length % 4, 0, -length % 4))
    blocks = len(wanted) // 4
    touched = wanted.reshape(blocks, 4, blocks, 4).any(dim=3).any(dim=1)
    assert plan.mask.to_dense()[0, 0].bool().tolist() == touched.tolist()


def test_flex_attention_has_no_dropout():
    segments, length = row(3)
    with pytest.raises(ValueError, match="dropout"):
        FlexPlan.of(segments, length).attend(*qkv(length), dropout=0.1)
