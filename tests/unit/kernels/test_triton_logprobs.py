"""Log-probs by Triton where there is no GPU: run by the interpreter, compiled for GPUs that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anabranch.kernels import logprobs
from tests.unit.kernels.test_triton import FP_FUSION, INTERPRETED, TARGETS, execute

NUMBERS = ("tokens", "vocabulary", "entries", "width", "part", "first")
TYPES = {
    "hidden": "*", "weight": "*", "bias": "*", "out": "*", "targets": "*i64", "tops": "*fp32", "totals": "*fp32",
    "moments": "*fp32", "chosen": "*fp32", "factors": "*fp32", "temperature": "fp32", **dict.fromkeys(NUMBERS, "i32"),
}  # fmt: skip


@pytest.mark.timeout(400)
def test_the_gpu_tests_pass_under_the_interpreter() -> None:
    done = execute("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_logprobs_gpu.py", timeout_s=390)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.filterwarnings(FP_FUSION)
@pytest.mark.parametrize(
    ("target", "dtype", "switches"),
    [
        ("H100", "bf16", {"HAS_BIAS": True, "ENTROPY": True}),
        ("H100", "fp16", {"HAS_BIAS": False, "ENTROPY": False}),
        ("H100", "fp32", {"HAS_BIAS": False, "ENTROPY": True}),
        ("H100", "fp32", {"HAS_BIAS": True, "ENTROPY": False, "PRECISION": "tf32"}),
        ("A100", "bf16", {"HAS_BIAS": False, "ENTROPY": True}),
        ("MI300", "bf16", {"HAS_BIAS": False, "ENTROPY": True}),
    ],
)
@pytest.mark.parametrize("name", ["_look_at_rows", "_differences"])
def test_kernels_compile_for_gpus(
    name: str, target: str, dtype: str, switches: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter accepts more than the compiler does."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from anabranch.kernels import triton_logprobs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    backend, architecture, lanes, binary = TARGETS[target]
    kernel = getattr(triton_logprobs, name)
    blocks = {
        "BN": triton_logprobs.BLOCK_TOKENS,
        "BV": triton_logprobs.BLOCK_ENTRIES,
        "BH": triton_logprobs.BLOCK_HIDDEN,
    }
    values = {"PRECISION": "ieee", "WIDEN": False} | blocks | switches
    types = {name: f"*{dtype}" if kind == "*" else kind for name, kind in TYPES.items()}
    signature = {a: types.get(a, "constexpr") for a in kernel.arg_names}
    constants = {a: values[a] for a, kind in signature.items() if kind == "constexpr"}
    source = ASTSource(kernel, signature, constants)
    assert compile_kernel(source, target=GPUTarget(backend, architecture, lanes)).asm[binary]


@pytest.mark.parametrize(
    ("device", "dtype", "installed", "expected"),
    [
        ("cuda", torch.float32, True, True),
        ("cuda", torch.bfloat16, True, True),
        ("cuda:1", torch.float16, True, True),
        ("cuda", torch.float64, True, False),
        ("cuda", torch.bfloat16, False, False),
        ("cpu", torch.float32, True, False),
        ("mps", torch.float32, True, False),
    ],
)
def test_which_tensors_go_through_triton(
    device: str, dtype: torch.dtype, installed: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "_has_triton", lambda: installed)
    assert logprobs.runs_triton(torch.device(device), dtype) == expected
