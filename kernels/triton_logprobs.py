"""Log-probs of chosen tokens on a GPU: kernels/logprobs.py with the logits never leaving the chip in the forward pass.

Invariant: values and gradients are those of `reference_logprobs` to rounding, for any N, V and H, and the same bits in every run:
nothing is added atomically. Held by tests/gpu/test_logprobs_gpu.py, which runs on a GPU or under Triton's interpreter.

Forward: a program has a block of tokens and a part of the vocabulary, goes through it with the running maximum m, s = Σ exp(x − m)
and Σ exp(x − m)·(x − m), and leaves these; the parts are put together by torch. Backward: for a tile of the vocabulary at a time
one kernel computes the logits again and writes their gradient (in the inputs' dtype), and two matrix products of torch
take that to the gradients of the weight's rows, complete with that tile, and of the hidden states.

Nothing here makes the host wait for the GPU, so targets are not looked at: one outside the vocabulary gives a log-prob of NaN.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from anabranch.kernels.triton_bits import kernel

BLOCK_TOKENS, BLOCK_ENTRIES, BLOCK_HIDDEN = 64, 128, 32  # of one product on the chip
PARTS = 16  # of the vocabulary, at most: programs of a block of tokens
TILE_ELEMENTS = 2**26  # logits whose gradient exists at once: 256 MiB in float32


class TritonLogprobs(torch.autograd.Function):
    """`apply(hidden, weight, bias, targets, temperature, entropy)`: see `chosen_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        hidden, weight, targets = hidden.contiguous(), weight.contiguous(), targets.contiguous()
        bias = None if bias is None else bias.contiguous()
        tokens, vocabulary = hidden.shape[0], weight.shape[0]
        blocks = triton.cdiv(vocabulary, BLOCK_ENTRIES)
        part = triton.cdiv(blocks, PARTS) * BLOCK_ENTRIES  # entries of each
        parts = triton.cdiv(vocabulary, part)
        top, total, moment = hidden.new_zeros((3, parts, tokens), dtype=torch.float32)
        chosen = hidden.new_full((tokens,), float("nan"), dtype=torch.float32)
        if tokens:
            with _on_device_of(hidden):
                _look_at_rows[(triton.cdiv(tokens, BLOCK_TOKENS), parts)](
                    hidden, weight, hidden if bias is None else bias, targets, top, total, moment, chosen,
                    tokens, vocabulary, hidden.shape[1], part, temperature,
                    ENTROPY=entropy, **_constants(hidden, bias),
                )  # fmt: skip
        highest = top.amax(0)
        fall = top - highest
        shrunk = fall.exp()
        whole = (total * shrunk).sum(0)
        entropies = whole.new_empty(0)
        if entropy:
            entropies = whole.log() - ((moment + total * fall) * shrunk).sum(0) / whole
        ctx.save_for_backward(hidden, weight, bias, targets, highest, whole)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies)
        return chosen - highest - whole.log(), entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, top, total = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        tokens, vocabulary, width = hidden.shape[0], weight.shape[0], hidden.shape[1]
        factor = (grads[0] / total / -ctx.temperature).contiguous()  # of the rows of exp(x − m) − s · onehot
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32) if need_hidden else None
        of_weight = torch.zeros_like(weight) if need_weight else None
        of_bias = torch.zeros_like(bias) if need_bias and bias is not None else None
        step = max(1, TILE_ELEMENTS // max(1, tokens) // BLOCK_ENTRIES) * BLOCK_ENTRIES
        room = hidden.new_empty(tokens * min(step, vocabulary))
        for first in range(0, vocabulary if tokens else 0, step):
            part = weight[first : first + step]
            d = room[: tokens * len(part)].view(tokens, len(part))
            with _on_device_of(hidden):
                grid = (triton.cdiv(tokens, BLOCK_TOKENS), triton.cdiv(len(part), BLOCK_ENTRIES))
                _differences[grid](
                    hidden, part, hidden if bias is None else bias[first:], targets, top, total, factor, d,
                    first, tokens, len(part), width, ctx.temperature, **_constants(hidden, bias),
                )  # fmt: skip
            if of_hidden is not None:
                of_hidden += d @ part
            if of_weight is not None:
                of_weight[first : first + step] = d.T @ hidden
            if of_bias is not None:
                of_bias[first : first + step] = d.sum(0, dtype=torch.float32)
        return None if of_hidden is None else of_hidden.to(hidden.dtype), of_weight, of_bias, None, None, None


def _constants(hidden: Tensor, bias: Tensor | None) -> dict[str, Any]:
    precise = torch.get_float32_matmul_precision() == "highest"  # as torch's own products
    return {
        "HAS_BIAS": bias is not None, "PRECISION": "ieee" if precise else "tf32",
        "WIDEN": triton.knobs.runtime.interpret,  # the interpreter multiplies bf16 as the integers that hold it
        "BN": BLOCK_TOKENS, "BV": BLOCK_ENTRIES, "BH": BLOCK_HIDDEN,
    }  # fmt: skip


def _on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


@kernel
def _logits(
    hidden: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    row: tl.tensor,
    entry: tl.tensor,
    tokens: tl.tensor,
    end: tl.tensor,
    width: tl.tensor,
    temperature: tl.tensor,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BH: tl.constexpr,
) -> tl.tensor:
    """float32 [BN, BV]: rounded to the dtype of `hidden`, then over the temperature. `entry` counts from `weight` and `bias`."""
    x = tl.zeros([BN, BV], tl.float32)
    for start in range(0, width, BH):
        column = start + tl.arange(0, BH)
        inside = column[None, :] < width
        h = tl.load(hidden + row[:, None] * width + column[None, :], (row[:, None] < tokens) & inside, 0)
        w = tl.load(weight + entry[:, None] * width + column[None, :], (entry[:, None] < end) & inside, 0)
        if WIDEN:
            h, w = h.to(tl.float32), w.to(tl.float32)
        x = tl.dot(h, tl.trans(w), x, input_precision=PRECISION)
    if HAS_BIAS:
        x += tl.load(bias + entry, entry < end, 0).to(tl.float32)[None, :]
    return x.to(hidden.dtype.element_ty).to(tl.float32) / temperature


@kernel
def _look_at_rows(
    hidden: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    targets: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    moments: tl.tensor,
    chosen: tl.tensor,
    tokens: tl.tensor,
    vocabulary: tl.tensor,
    width: tl.tensor,
    part: tl.tensor,
    temperature: tl.tensor,
    ENTROPY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    mine = row < tokens
    first = tl.program_id(1).to(tl.int64) * part
    end = tl.minimum(first + part, vocabulary)
    target = tl.load(targets + row, mine, -1)
    top = tl.full([BN], -3.4e38, tl.float32)  # not −inf, which less itself is no number
    total, moment, found = (tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32))
    for start in range(first, end, BV):
        entry = start + tl.arange(0, BV).to(tl.int64)
        x = _logits(
            hidden, weight, bias, row, entry, tokens, end, width, temperature, HAS_BIAS, PRECISION, WIDEN, BN, BV, BH
        )  # fmt: skip
        inside = (entry < end)[None, :]
        found += tl.sum(tl.where(entry[None, :] == target[:, None], x, 0.0), 1)
        higher = tl.maximum(top, tl.max(tl.where(inside, x, -3.4e38), 1))
        x = tl.where(inside, x - higher[:, None], -3.4e38)
        e = tl.exp(x)
        fall = top - higher
        if ENTROPY:
            moment = (moment + total * fall) * tl.exp(fall) + tl.sum(e * x, 1)
        total = total * tl.exp(fall) + tl.sum(e, 1)
        top = higher
    here = tl.program_id(1).to(tl.int64) * tokens + row
    tl.store(tops + here, top, mine)
    tl.store(totals + here, total, mine)
    if ENTROPY:
        tl.store(moments + here, moment, mine)
    tl.store(chosen + row, found, mine & (target >= first) & (target < end))


@kernel
def _differences(
    hidden: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    targets: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    factors: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    tokens: tl.tensor,
    entries: tl.tensor,
    width: tl.tensor,
    temperature: tl.tensor,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BH: tl.constexpr,
) -> None:
    """`out` [tokens, entries]: factor · (exp(x − m) − s · onehot). `first`: the entry of the vocabulary that is the tile's first."""
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    mine = row < tokens
    entry = tl.program_id(1).to(tl.int64) * BV + tl.arange(0, BV)
    x = _logits(
        hidden, weight, bias, row, entry, tokens, entries, width, temperature, HAS_BIAS, PRECISION, WIDEN, BN, BV, BH
    )  # fmt: skip
    target = tl.load(targets + row, mine, -1) - first
    inside = mine[:, None] & (entry < entries)[None, :]
    d = tl.exp(tl.where(inside, x - tl.load(tops + row, mine, 0)[:, None], 0.0))
    d = tl.where(entry[None, :] == target[:, None], d - tl.load(totals + row, mine, 0)[:, None], d)
    d *= tl.load(factors + row, mine, 0)[:, None]
    tl.store(out + row[:, None] * entries + entry[None, :], d.to(out.dtype.element_ty), inside)
