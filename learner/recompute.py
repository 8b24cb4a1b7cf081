"""Gradient checkpointing: a layer's activations are computed again in the backward pass instead of kept.

Invariant: gradients are those without it, bit for bit on the CPU, also where the forward pass runs with other weights than the
parameters (`MasterWeights`): the second pass computes with the weights of the first. Held by
tests/unit/learner/test_recompute.py.

Transformers' own switch (`gradient_checkpointing_enable`) is not used: it works in training mode only, which would turn
dropout on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from anabranch.schemas.errors import ConfigError


def recompute_layers(lm: Any, *, replaced_weights: bool) -> None:
    """Checkpoint every layer of `lm`, a Hugging Face model, for good.

    Args:
        replaced_weights: whether forward passes run under `torch.func.functional_call`, which is over when the backward pass
            begins.

    Raises:
        ConfigError: the model does not say what its layers are.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{type(lm).__name__} has no layers to checkpoint; set learner.gradient_checkpointing = false"
        )
    for layer in layers:
        layer.forward = _recomputed(layer, layer.forward, replaced_weights)


class _Held(nn.Module):
    """`layer`'s forward pass with weights that are given to it."""

    def __init__(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = layer
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


def _recomputed(layer: nn.Module, forward: Callable[..., Any], replaced_weights: bool) -> Callable[..., Any]:
    held = _Held(layer, forward)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        call: Callable[..., Any] = forward
        if replaced_weights:
            weights = dict(held.named_parameters())  # those of this pass, and no longer there in the next

            def call(*args: Any, **kwargs: Any) -> Any:
                return torch.func.functional_call(held, weights, args, kwargs)

        return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run
