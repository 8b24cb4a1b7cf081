"""The Triton kernels where there is no GPU: run by the interpreter, compiled for GPUs that are not there.

Triton decides at its first import whether it interprets, for the whole process and whoever imports it, so that runs in a
process of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.kernels.delta_dtypes import FORMS
from anabranch.schemas.errors import DeltaError

ROOT = Path(__file__).resolve().parents[3]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FP_FUSION = "ignore:TRITON_DEFAULT_FP_FUSION"  # triton 3.9 announces another default; these kernels have no floats


def execute(*argv: str, timeout_s: int, interpret: bool = True) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if interpret:
        environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-I", *argv],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.timeout(400)
def test_the_gpu_tests_pass_under_the_interpreter() -> None:
    argv = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "0", "tests/gpu/test_delta_gpu.py")
    done = execute(*argv, timeout_s=390)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


# Types of the kernels' arguments as `scan`, `ranks` and `select` pass them; "*" alone is a pointer to the weights' bits,
# "n" a number: Triton makes kernels of their own for 32 bits, for 64, and for 1.
LAUNCHES: dict[str, dict[str, str]] = {
    "triton_scan._compare": {"old": "*", "new": "*", "start": "n", "size": "n", "marks": "*u8", "counts": "*i64"},
    "triton_scan._compact": {"marks": "*u8", "firsts": "*i64", "found": "*i64"},
    "triton_ranks._count_classes": {"old": "*", "size": "n", "counts": "*i32"},
    "triton_ranks._rank": {
        "old": "*", "size": "n", "directory": "*i32", "indices": "*i64", "k": "n", "classes": "*u8", "places": "*i32",
    },
    "triton_locate._find_block": {
        "directory": "*i32", "last": "n", "rounds": "n", "classes": "*u8", "places": "*i32", "k": "n", "blocks": "*i32",
    },
    "triton_locate._find_element": {
        "old": "*", "size": "n", "directory": "*i32", "classes": "*u8", "places": "*i32", "blocks": "*i32", "k": "n",
        "indices": "*i64",
    },
}  # fmt: skip
TARGETS: dict[str, tuple[str, Any, int, str]] = {  # backend, architecture, lanes of a warp, what the machine runs
    "A100": ("cuda", 80, 32, "cubin"),
    "H100": ("cuda", 90, 32, "cubin"),
    "MI300": ("hip", "gfx942", 64, "hsaco"),
}


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.filterwarnings(FP_FUSION)
@pytest.mark.parametrize(
    ("target", "dtype", "number"),
    [
        *(("H100", dtype, "i32") for dtype in ("bf16", "f32", "f64", "f8_e4m3", "u8")),
        *(("H100", "bf16", number) for number in ("i64", "1")),
        *((target, "bf16", "i32") for target in ("A100", "MI300")),
    ],
)
@pytest.mark.parametrize("name", LAUNCHES)
def test_kernels_compile_for_gpus(
    name: str, target: str, dtype: str, number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter accepts more than the compiler does."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    backend, architecture, lanes, binary = TARGETS[target]
    module_name, _, kernel_name = name.partition(".")
    module = importlib.import_module(f"anabranch.kernels.{module_name}")
    kernel = getattr(module, kernel_name)
    form = FORMS[dtype]
    meant = {"*": f"*i{8 * form.width_bytes}", "n": "constexpr" if number == "1" else number}
    types = {a: meant.get(t, t) for a, t in LAUNCHES[name].items()}
    signature = {a: types.get(a, "constexpr") for a in kernel.arg_names}
    values = {"SHIFT": form.exponent_shift, "MASK": form.exponent_mask, **vars(module)}
    constants = {a: values.get(a, 1) for a, t in signature.items() if t == "constexpr"}
    source = ASTSource(kernel, signature, constants)
    assert compile_kernel(source, target=GPUTarget(backend, architecture, lanes)).asm[binary]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes tensors in host memory")
def test_weights_in_host_memory_are_refused_by_name() -> None:
    from anabranch.kernels.triton_scan import scan

    with pytest.raises(DeltaError, match="weights in host memory were given to the GPU's kernels"):
        scan(torch.zeros(5, dtype=torch.int16), torch.ones(5, dtype=torch.int16))


def test_the_cpu_path_does_not_import_triton() -> None:
    names = sorted(p.stem for p in (ROOT / "kernels").glob("*.py") if not p.stem.startswith("triton_"))
    program = "\n".join(f"import anabranch.kernels.{name}" for name in names)
    done = execute("-c", f"{program}\nimport sys\nprint('triton' in sys.modules)", timeout_s=100, interpret=False)
    assert done.stdout == "False\n", done.stdout + done.stderr


BENCHMARK = "benchmarks/gpu/delta_codec.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_benchmark_says_in_one_line_that_there_is_no_gpu() -> None:
    done = execute(BENCHMARK, timeout_s=60, interpret=False)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "no CUDA device" in line


def test_the_benchmark_runs_and_compares_under_the_interpreter() -> None:
    small = ["--elements", "3000", "--scan-elements", "5000", "--repeats", "1", "--density", "0.01", "--dtype", "bf16"]
    done = execute(BENCHMARK, *small, "--json", timeout_s=110)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["what"] for row in rows} >= {"copy", "scan", "directory", "ranks", "select", "encode", "decode"}
    assert all(row["equal_to"] in ("CPU", "torch.nonzero") and row["gb_s"] > 0 for row in rows)
    table = execute(BENCHMARK, *small, timeout_s=110)
    assert table.returncode == 0, table.stderr
    assert "interpreter" in table.stdout
    assert "bit for bit" in table.stdout
