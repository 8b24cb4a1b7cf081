"""Log-probs of chosen tokens from hidden states, without ever holding the logits [tokens, vocabulary].

Invariant: `chosen_logprobs` equals `reference_logprobs` (values and gradients) to rounding, for all sizes of tiles, whatever is
kept between the passes, and on the GPU's path as well. Held by tests/unit/kernels/test_logprobs.py and
tests/gpu/test_logprobs_gpu.py.

The passes are in kernels/logprob_passes.py (torch, any device) and kernels/triton_logprobs.py (a GPU). Docs: docs/learner.md.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from anabranch.kernels.logprob_passes import Rows, backward, forward
from anabranch.kernels.logprob_tiles import Logits, tile_shape, wide_dtype
from anabranch.schemas.errors import ModelMismatchError

# Of exp(logits) what is kept from the forward to the backward pass, at most: with it the peak stays below 1/8 of three times
# the logits, which log_softmax over logits takes, and for any number of tokens below 1 GiB.
KEPT_SHARE, KEPT_BYTES = 0.35, 2**30


def reference_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """What `chosen_logprobs` computes, in four lines that hold the whole [N, V]."""
    logits = F.linear(hidden, weight, bias)
    log_p = torch.log_softmax(logits.to(wide_dtype(logits.dtype)) / temperature, dim=-1)
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy.detach()


def chosen_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    entropy: bool = True,
    chunk_tokens: int | None = None,
    chunk_vocabulary: int | None = None,
    kept_share: float = KEPT_SHARE,
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at `targets`, and the entropy of each distribution.

    Logits have the precision of `hidden`'s dtype, as the model's own have, and are widened to float32 (float64 stays).

    Args:
        hidden: [N, H]; weight: [V, H]; bias: [V] or None; all of one floating dtype, on one device.
        targets: int64 [N], in 0..V−1. On a GPU, which nobody waits for, one outside gives a log-prob of NaN.
        temperature: > 0.
        entropy: whether it is wanted; it takes one more tile of memory, and time.
        chunk_tokens, chunk_vocabulary: the largest tile of logits; default: about 16 MiB. Without effect on the GPU's path.
        kept_share: of exp(logits), kept for the backward pass; never more than `KEPT_BYTES`. The same.

    Returns:
        float32 (or float64) [N] log-probs, with gradient to `hidden`, `weight`, `bias`;
        the same [N] entropies in nats, without gradient; [0] where they are not wanted.

    Raises:
        ValueError: the inputs do not go together; a temperature that is not above 0.
        ModelMismatchError: a target is no row of `weight`.
    """
    _check_inputs(hidden, weight, bias, targets, temperature)
    if runs_triton(hidden.device, hidden.dtype):
        from anabranch.kernels.triton_logprobs import TritonLogprobs

        return TritonLogprobs.apply(hidden, weight, bias, targets, temperature, entropy)  # type: ignore[no-any-return,no-untyped-call]
    _check_targets(targets, weight)
    copied = hidden.shape[1] if hidden.dtype != wide_dtype(hidden.dtype) else 0
    tile = tile_shape(hidden.shape[0], weight.shape[0], chunk_tokens, chunk_vocabulary, copied_width=copied)
    keep = kept_share if torch.is_grad_enabled() else 0.0
    return _ChosenLogprobs.apply(hidden, weight, bias, targets, temperature, tile, entropy, keep)  # type: ignore[no-any-return,no-untyped-call]


def runs_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether such tensors go through Triton: on a GPU where it is installed, and not in float64, which few GPUs are made for."""
    return device.type == "cuda" and dtype in (torch.float32, torch.bfloat16, torch.float16) and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _check_inputs(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float) -> None:
    given = [x for x in (hidden, weight, bias) if x is not None]
    shapes = [list(x.shape) for x in (*given, targets)]
    if len(shapes[0]) != 2 or shapes[1:] != [
        [len(weight), hidden.shape[1]],
        *[[len(weight)]] * (len(given) - 2),
        [len(hidden)],
    ]:
        raise ValueError(f"hidden [N, H], weight [V, H], bias [V] and targets [N] do not go together: {shapes}")
    if len({x.dtype for x in given}) > 1 or targets.dtype != torch.int64:
        raise ValueError(f"one floating dtype and int64 targets are wanted: {[x.dtype for x in (*given, targets)]}")
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} is not above 0")


def _check_targets(targets: Tensor, weight: Tensor) -> None:
    if not targets.numel():
        return
    lowest, highest = (int(t) for t in targets.aminmax())
    if lowest < 0 or highest >= len(weight):
        raise ModelMismatchError(
            f"log-probs were asked for of token {lowest if lowest < 0 else highest}, and the output head has "
            f"{len(weight)} rows: the tokens are another model's"
        )


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        tile: tuple[int, int],
        entropy: bool,
        kept_share: float,
    ) -> tuple[Tensor, Tensor]:
        logits = Logits(hidden, weight, bias, temperature, tile)
        size = logits.tokens * logits.vocabulary
        most = min(int(kept_share * size), KEPT_BYTES // logits.hidden.element_size())
        rows, kept = forward(
            logits, targets, entropy=entropy, keep_elements=most if any(ctx.needs_input_grad) else 0
        )  # fmt: skip
        ctx.save_for_backward(hidden, weight, bias, targets, rows.top, rows.total)
        ctx.temperature, ctx.tile, ctx.kept = temperature, tile, kept
        entropies = rows.entropies()
        ctx.mark_non_differentiable(entropies)
        return rows.logprobs(), entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, top, total = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None  # a second pass through the same graph computes everything again
        found = backward(
            Logits(hidden, weight, bias, ctx.temperature, ctx.tile),
            targets,
            Rows(top, total, total, None),
            kept,
            grads[0],
            ctx.needs_input_grad[:3],
        )
        return found.hidden, found.weight, found.bias, None, None, None, None, None
