"""Log-probs by Triton against the reference in float64, and against the CPU's path.

Skipped without a CUDA device; with TRITON_INTERPRET=1 in the environment they run under Triton's interpreter instead, on any
machine. tests/unit/kernels/test_triton_logprobs.py does that.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.kernels import logprobs
from anabranch.kernels.logprobs import chosen_logprobs, reference_logprobs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("no CUDA device (tests/unit/kernels/test_triton_logprobs.py runs this under Triton's interpreter)")
    from anabranch.kernels import triton_logprobs

    if INTERPRETED:  # borders without large arrays
        triton_logprobs.BLOCK_TOKENS, triton_logprobs.BLOCK_ENTRIES, triton_logprobs.BLOCK_HIDDEN = 16, 32, 16
        triton_logprobs.PARTS = 3
        triton_logprobs.TILE_ELEMENTS = 2048
    return triton_logprobs


def leaves(dtype: torch.dtype, n: int, hidden: int, vocabulary: int, *, bias: bool) -> list[Any]:
    g = torch.Generator().manual_seed(n + 100 * vocabulary)
    shapes = [(n, hidden), (vocabulary, hidden), *([(vocabulary,)] if bias else [])]
    return [torch.randn(*s, generator=g).to(dtype).to(DEVICE).requires_grad_() for s in shapes]


def both(
    gpu: ModuleType, inputs: list[Any], targets: Any, temperature: float, *, entropy: bool = True
) -> tuple[Any, Any]:
    """Log-probs, entropies and gradients: Triton's, and the reference's in float64 of the same inputs."""
    h, w, *b = inputs
    upstream = torch.linspace(-1, 2, len(h), device=DEVICE)
    ours, entropies = gpu.TritonLogprobs.apply(h, w, b[0] if b else None, targets, temperature, entropy)
    grads = torch.autograd.grad(ours @ upstream, inputs)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    theirs, their_entropies = reference_logprobs(
        exact[0], exact[1], exact[2] if b else None, targets, temperature=temperature
    )
    their_grads = torch.autograd.grad(theirs @ upstream.double(), exact)
    return (ours.detach(), entropies, *grads), (theirs.detach(), their_entropies, *their_grads)


@given(
    dtype=st.sampled_from(list(TOLERANCE)),
    n=st.integers(1, 40),
    hidden=st.integers(1, 40),
    vocabulary=st.one_of(st.integers(1, 150), st.sampled_from([31, 32, 33, 96, 97, 128])),
    bias=st.booleans(),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
)
@settings(max_examples=30, deadline=None)
def test_any_size_gives_the_values_and_gradients_of_float64(
    gpu: ModuleType, dtype: torch.dtype, n: int, hidden: int, vocabulary: int, bias: bool, temperature: float
) -> None:
    inputs = leaves(dtype, n, hidden, vocabulary, bias=bias)
    targets = torch.arange(n, device=DEVICE) * 7 % vocabulary
    for ours, theirs in zip(*both(gpu, inputs, targets, temperature), strict=True):
        scale = max(1.0, float(theirs.abs().max()))
        assert float((ours.double() - theirs).abs().max()) < TOLERANCE[dtype] * scale


def test_in_float32_it_is_the_cpu_path(gpu: ModuleType) -> None:
    inputs = leaves(torch.float32, 50, 24, 300, bias=True)
    targets = torch.arange(50, device=DEVICE) * 5
    ours, entropies = gpu.TritonLogprobs.apply(*inputs, targets, 0.8, True)
    theirs, their_entropies = chosen_logprobs(*(x.cpu() for x in inputs), targets.cpu(), temperature=0.8)
    torch.testing.assert_close(ours.cpu(), theirs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropies.cpu(), their_entropies, atol=1e-5, rtol=1e-5)


def test_logits_of_ten_thousand_stay_numbers(gpu: ModuleType) -> None:
    h = torch.tensor([[1e4], [-1e4]], device=DEVICE).requires_grad_()
    w = torch.linspace(-1, 1, 70, device=DEVICE)[:, None].requires_grad_()
    (ours, entropies, *grads), _ = both(gpu, [h, w], torch.tensor([69, 3], device=DEVICE), 1.0)
    assert ours.tolist() == pytest.approx([0.0, -1e4 * float((w[3] - w[0]).detach())], rel=1e-6)
    assert entropies.tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    assert all(g.isfinite().all() for g in grads)


def test_entropies_only_where_they_are_wanted(gpu: ModuleType) -> None:
    inputs = leaves(torch.float32, 5, 8, 40, bias=False)
    ours, entropies = gpu.TritonLogprobs.apply(*inputs, None, torch.arange(5, device=DEVICE), 1.0, False)
    assert entropies.shape == (0,)
    assert ours.isfinite().all()
    assert not entropies.requires_grad


def test_no_tokens_is_no_error(gpu: ModuleType) -> None:
    inputs = leaves(torch.float32, 0, 8, 40, bias=True)
    ours, _ = gpu.TritonLogprobs.apply(*inputs, torch.empty(0, dtype=torch.int64, device=DEVICE), 1.0, True)
    assert ours.shape == (0,)
    assert all((g == 0).all() for g in torch.autograd.grad(ours.sum(), inputs))


def test_inputs_that_are_not_contiguous(gpu: ModuleType) -> None:
    h, w = leaves(torch.float32, 9, 12, 50, bias=False)
    strided = [x.detach().T.contiguous().T.requires_grad_() for x in (h, w)]
    targets = torch.arange(18, device=DEVICE)[::2]
    ours, theirs = (both(gpu, inputs, targets, 1.0)[0] for inputs in (strided, [h, w]))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_target_outside_the_vocabulary_is_no_number(gpu: ModuleType) -> None:
    inputs = leaves(torch.float32, 3, 8, 40, bias=False)
    ours, _ = gpu.TritonLogprobs.apply(*inputs, None, torch.tensor([39, 40, -1], device=DEVICE), 1.0, True)
    assert ours.isnan().tolist() == [False, True, True]


def test_tensors_on_a_gpu_go_this_way(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(logprobs, "runs_triton", lambda device, dtype: dtype == torch.float32)
    inputs = leaves(torch.float32, 3, 8, 40, bias=False)
    outside = torch.tensor([1, 2, 40], device=DEVICE)
    ours, entropies = chosen_logprobs(*inputs, None, outside, temperature=1.0)
    assert ours.isnan().tolist() == [False, False, True]  # the other path refuses it by name
    assert entropies.isfinite().all()
