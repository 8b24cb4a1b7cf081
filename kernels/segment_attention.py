"""Attention of a packed row by torch's scaled_dot_product_attention, segments of like shape in one call.

Invariant: `SegmentPlan.attend` equals `segments.reference_attention` (values and gradients), and a token of another segment
has no influence at all, not even on rounding. On the CPU the result is a function of its arguments alone, bit for bit: the
backward pass adds in a fixed order. Held by tests/unit/kernels/test_segment_attention.py.

Segments of like length are computed together: right padding, which causal attention does not see, makes them one batch. The
children of a segment see a copy of its keys and values before their own, so that nothing larger than
[child, parent + child] is ever masked. Padding is bought only while it is cheaper than one more call (`CALL_PAIRS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from anabranch.kernels.segments import Stretch, stretches

CALL_PAIRS = 2**13  # query-key pairs that take about as long as one more call


@dataclass(frozen=True, eq=False)
class _Rows:
    """n rows of w positions to be taken from L: padded places take the row's first and give no gradient back."""

    index: Tensor  # int64 [n·w], positions
    real: Tensor  # int64 [m], places in `index` that are not padding
    positions: Tensor  # int64 [m], index[real]
    shape: tuple[int, int]


@dataclass(frozen=True, eq=False)
class _Block:
    """Segments computed in one call."""

    queries: _Rows
    parents: _Rows | None  # of the parents' keys and values, one row for each parent
    parent_of: Tensor | None  # int64 [n], row of `parents`; None: all have the same
    mask: Tensor | None  # bool [n or 1, 1, q, parent + q]; None without parents: causal


@dataclass(frozen=True, eq=False)
class SegmentPlan:
    """How a row is cut into calls. Made once for a row, used by every layer."""

    length: int
    blocks: tuple[_Block, ...]
    restore: _Rows  # [1, L]: where each position stands in the blocks' results, one after the other
    computed_pairs: int  # query-key pairs of the calls, padding and masked ones included
    pairs: int  # those that are wanted

    @classmethod
    def of(cls, segments: NDArray[np.int64], length: int, device: torch.device | str = "cpu") -> SegmentPlan:
        """Args: as `stretches`, which says what is refused."""
        found = stretches(segments, length)
        where = np.empty(length, np.int64)
        at = computed = 0
        blocks = []
        for members in _calls(found):
            width = max(s.length for s in members)
            for row, s in enumerate(members):
                where[s.start : s.start + s.length] = at + row * width + np.arange(s.length)
            at += len(members) * width
            computed += len(members) * _pairs_of_call(members)
            blocks.append(_block(members, width, device))
        everywhere = torch.arange(length, device=device)
        index = torch.from_numpy(where).to(device)
        restore = _Rows(index, everywhere, index, (1, length))
        return cls(length, tuple(blocks), restore, computed, sum(s.pairs for s in found))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None, dropout: float = 0.0
    ) -> Tensor:
        """Attention of one row within its segments.

        Args:
            query: [1, heads, L, D]; key, value: [1, key-value heads, L, D], heads a multiple of key-value heads.
            scale: of query · key; default 1/√D.
            dropout: probability that a weight is dropped.

        Returns:
            [1, heads, L, D].
        """
        if query.shape[0] != 1 or query.shape[2] != self.length:
            raise ValueError(f"queries of shape {list(query.shape)}, but the plan is of one row of {self.length}")
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        results = []
        for block in self.blocks:
            own_q, own_k, own_v = (_take(x, block.queries) for x in (q, k, v))
            if block.parents is not None:
                own_k, own_v = (_below_parents(x, own, block) for x, own in ((k, own_k), (v, own_v)))
            out = _attend(own_q, own_k, own_v, block.mask, scale=scale, dropout=dropout)
            results.append(out.transpose(1, 2).flatten(0, 1))
        joined = results[0] if len(results) == 1 else torch.cat(results)
        return _take(joined, self.restore)


def _calls(found: Sequence[Stretch]) -> list[list[Stretch]]:
    """Which segments share a call: neighbours in order of parent, then length, as long as their padding costs less than a
    call of its own would. A function of lengths and starts alone."""
    order = sorted(found, key=lambda s: (-s.parent_length, s.parent_start, -s.length, s.start))
    calls: list[list[Stretch]] = []
    for s in order:
        if calls and bool(calls[-1][0].parent_length) == bool(s.parent_length):
            apart = len(calls[-1]) * _pairs_of_call(calls[-1]) + _pairs_of_call([s]) + CALL_PAIRS
            together = [*calls[-1], s]
            if len(together) * _pairs_of_call(together) <= apart:
                calls[-1] = together
                continue
        calls.append([s])
    return calls


def _pairs_of_call(members: Sequence[Stretch]) -> int:
    """Query-key pairs computed for each member."""
    width, above = max(s.length for s in members), max(s.parent_length for s in members)
    return width * (width + above) if above else width * (width + 1) // 2


def _block(members: Sequence[Stretch], width: int, device: torch.device | str) -> _Block:
    queries = _rows([(s.start, s.length) for s in members], device)
    if not members[0].parent_length:
        return _Block(queries, None, None, None)
    spans = sorted({(s.parent_start, s.parent_length) for s in members})
    above = max(length for _, length in spans)
    lengths = torch.tensor([s.parent_length for s in members], device=device)
    if (lengths == above).all():
        lengths = lengths[:1]
    parent = (torch.arange(above, device=device) < lengths[:, None])[:, None, None, :]
    own = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    mask = torch.cat([parent.expand(len(lengths), 1, width, above), own.expand(len(lengths), 1, width, width)], dim=-1)
    parent_of = None
    if len(spans) > 1:
        parent_of = torch.tensor([spans.index((s.parent_start, s.parent_length)) for s in members], device=device)
    return _Block(queries, _rows(spans, device), parent_of, mask)


def _rows(spans: Sequence[tuple[int, int]], device: torch.device | str) -> _Rows:
    starts, lengths = np.array(spans, np.int64).T[:, :, None]
    offsets = np.arange(int(lengths.max()))
    valid = offsets < lengths
    index = np.where(valid, starts + offsets, starts).reshape(-1)  # weight 0 times a NaN of others would be one
    real = np.flatnonzero(valid)
    index_, real_, positions = (torch.from_numpy(a).to(device) for a in (index, real, index[real]))
    return _Rows(index_, real_, positions, (len(spans), len(offsets)))


def _take(x: Tensor, rows: _Rows) -> Tensor:
    """[L, heads, D] -> [n, heads, w, D]."""
    taken: Tensor = _Take.apply(x.flatten(1), rows)  # type: ignore[no-untyped-call]
    return taken.reshape(*rows.shape, *x.shape[1:]).transpose(1, 2)


class _Take(torch.autograd.Function):
    """Rows of a [L, F] matrix, each real one at most once: so the gradient is put back, not added up, in any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: _Rows) -> Tensor:
        ctx.rows, ctx.length = rows, x.shape[0]
        return x.index_select(0, rows.index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        rows, grad = ctx.rows, grads[0]
        if len(rows.real) != len(grad):
            grad = grad.index_select(0, rows.real)
        full = grad.new_zeros(ctx.length, grad.shape[1])
        return full.index_copy_(0, rows.positions, grad), None


def _below_parents(x: Tensor, own: Tensor, block: _Block) -> Tensor:
    """Keys or values of each row's parent, then its own: [n, heads, parent + q, D]."""
    assert block.parents is not None
    parents = _take(x, block.parents)
    # The backward pass of index_select adds in the order of the rows.
    each = parents.expand(len(own), -1, -1, -1) if block.parent_of is None else parents.index_select(0, block.parent_of)
    return torch.cat([each, own], dim=2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float | None, dropout: float) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    additive = None
    if mask is not None:
        additive = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
        if groups > 1 and q.device.type == "cuda":
            # With a mask CUDA's fast kernels know no grouped heads.
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
            groups = 1
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=additive, dropout_p=dropout, is_causal=mask is None, scale=scale, enable_gqa=groups > 1
    )
