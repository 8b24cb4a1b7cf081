"""Log-probs of chosen tokens from hidden states, without a float32 [tokens, vocab] tensor for more than one chunk.

Invariant: `chosen_logprobs` equals `reference_logprobs` (values and gradients) for every chunk size. Held by
tests/unit/kernels/test_logprobs.py.

The forward pass keeps the log-sum-exp of each token; the backward pass computes the logits of each chunk again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_ELEMENTS = 2**24  # logits alive at once: 64 MiB in float32


def reference_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """What `chosen_logprobs` computes, in four lines that hold the whole [N, V]."""
    logits = F.linear(hidden, weight, bias)
    log_p = torch.log_softmax(_wide(logits) / temperature, dim=-1)
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy.detach()


def chosen_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at `targets`, and the entropy of each distribution.

    Logits are computed in the dtype of `hidden`, as the model itself does, and widened to float32 (float64 stays).

    Args:
        hidden: [N, H]; weight: [V, H]; bias: [V] or None; all of one floating dtype.
        targets: int64 [N], in 0..V−1.
        chunk_tokens: tokens whose logits exist at once; default: about `CHUNK_ELEMENTS` logits.

    Returns:
        float32 (or float64) [N] log-probs, with gradient to `hidden`, `weight`, `bias`;
        the same [N] entropies in nats, without gradient.
    """
    chunk = chunk_tokens or max(1, CHUNK_ELEMENTS // weight.shape[0])
    logprobs, entropy = _ChosenLogprobs.apply(hidden, weight, bias, targets, temperature, chunk)  # type: ignore[no-untyped-call]
    return logprobs, entropy


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        n = hidden.shape[0]
        logprobs, entropy, lse = (torch.empty(n, dtype=wide, device=hidden.device) for _ in range(3))
        for start in range(0, n, chunk):
            part = slice(start, min(start + chunk, n))
            logits = _wide(F.linear(hidden[part], weight, bias)) / temperature
            lse[part] = torch.logsumexp(logits, dim=-1)
            logprobs[part] = logits.gather(1, targets[part, None]).squeeze(1) - lse[part]
            log_p = logits - lse[part, None]
            entropy[part] = -(log_p.exp() * log_p).sum(dim=-1)
        ctx.save_for_backward(hidden, weight, bias, targets, lse)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse = ctx.saved_tensors
        grad = grads[0]
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        # Sums over chunks run in the wide dtype, so that the chunk size does not show in a bf16 gradient.
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=lse.dtype) if need_bias else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, min(start + ctx.chunk, hidden.shape[0]))
            logits = _wide(F.linear(hidden[part], weight, bias)) / ctx.temperature
            grad_logits = (logits - lse[part, None]).exp_().mul_(-grad[part, None])  # −g·p
            grad_logits.scatter_add_(1, targets[part, None], grad[part, None])  # +g at the target
            grad_logits = grad_logits.div_(ctx.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad_logits.sum(dim=0, dtype=lse.dtype)
        return (
            grad_hidden,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            None,
            None,
            None,
        )
