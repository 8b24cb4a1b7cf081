"""Tensors as the Triton kernels of the delta codec take them: flat signed integers as wide as the dtype.

Invariant: bits are looked at, never converted: a view shares the memory of its tensor, and a step of any two patterns
leads from the one to the other, as kernels/ordered.py has it (the sign differs, torch knows no arithmetic of unsigned
integers; the bits do not). Held by tests/gpu/test_delta_gpu.py, which runs on a GPU or under Triton's interpreter.

What these kernels run on is decided when triton is first imported: a GPU, or, with TRITON_INTERPRET=1 in the
environment, the CPU through NumPy, for tests. Nothing that works without a GPU imports the modules `triton_*`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import triton

from anabranch.kernels.delta_dtypes import BitForm
from anabranch.schemas.errors import DeltaError

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by width


def kernel(function: Callable[..., None]) -> Any:
    """`function` as a Triton kernel: `k[grid](...)` starts it on the current device."""
    return triton.jit(function)


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Inside, kernels start on the GPU that `tensor` is on: Triton asks for the current one only.

    Raises:
        DeltaError: it is in host memory, and this is not the interpreter.
    """
    if tensor.is_cuda:
        return torch.cuda.device(tensor.device)
    if not triton.knobs.runtime.interpret:
        raise DeltaError("weights in host memory were given to the GPU's kernels: use kernels/delta_sparse.py for them")
    return contextlib.nullcontext()


def flat_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of `tensor` (any shape, any dtype of a checkpoint) as signed integers of its width [numel].

    Raises:
        DeltaError: it is not contiguous; a copy made here would hide that writes to it are lost.
    """
    if not tensor.is_contiguous():
        raise DeltaError(f"a tensor {list(tensor.shape)} is not contiguous: copy it first (tensor.contiguous())")
    if tensor.element_size() not in SIGNED:
        raise DeltaError(f"a tensor is {tensor.dtype}, which is no dtype of a checkpoint")
    return tensor.detach().reshape(-1).view(SIGNED[tensor.element_size()])


def steps_between(old: torch.Tensor, new: torch.Tensor, form: BitForm) -> torch.Tensor:
    """How many places `new` [k] comes after `old` [k] in the order of values, modulo 2^width."""
    return _ordered(new, form) - _ordered(old, form)


def stepped(old: torch.Tensor, steps: torch.Tensor, form: BitForm) -> torch.Tensor:
    """Inverse of `steps_between`: the patterns `steps` [k] places after `old` [k]."""
    if not form.is_float:
        return old + steps
    there = _ordered(old, form) + steps
    return there ^ (~_sign_everywhere(there) | torch.iinfo(there.dtype).min)


def _ordered(bits: torch.Tensor, form: BitForm) -> torch.Tensor:
    """Patterns with the sign bit set are inverted, the others get it."""
    if not form.is_float:
        return bits
    return bits ^ (_sign_everywhere(bits) | torch.iinfo(bits.dtype).min)


def _sign_everywhere(bits: torch.Tensor) -> torch.Tensor:
    """−1 where the sign bit is set, else 0."""
    return bits >> (8 * bits.element_size() - 1)
