"""Compiled functions run without the GIL, and without a place to keep them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from anabranch.kernels.compiled import compiled


@compiled
def _spin(x: np.ndarray, times: int) -> float:
    total = 0.0
    for _ in range(times):
        for i in range(x.size):
            total += x[i]
    return total


def test_other_threads_run_meanwhile() -> None:
    x = np.ones(100_000)
    _spin(x, 1)
    thread = threading.Thread(target=_spin, args=(x, 3_000))  # a few tenths of a second without a bytecode in between
    thread.start()
    ticks = 0
    while thread.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks > 5, "one or two, were the interpreter held all the while"


def test_llvmlite_answers_to_symbols_alone() -> None:
    """Else vLLM's engine cannot be built in this process (tests/e2e builds it)."""
    from llvmlite.binding import ffi

    assert not hasattr(ffi.lib, "__dict__")
    assert ffi.lib.LLVMPY_GetVersionInfo() > 0


def test_what_is_kept_on_disk_goes_when_another_file_of_the_folder_changes(tmp_path: Path) -> None:
    """Functions inline others from their neighbours' files; numba looks at a function's own file alone."""
    shutil.copy(compiled.__globals__["__file__"], tmp_path / "compiled.py")
    (tmp_path / "limits.py").write_text("LIMIT = 20\n")
    (tmp_path / "user.py").write_text(
        "from compiled import compiled\nimport limits\nLIMIT = limits.LIMIT\n\n@compiled\ndef answer():\n    return LIMIT\n\n"
        "print(answer(), sum(answer.stats.cache_hits.values()))\n"
    )

    def run() -> str:
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import user"]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout

    assert run() == "20 0\n"
    assert run() == "20 1\n"  # kept
    (tmp_path / "limits.py").write_text("LIMIT = 21  # and so on\n")
    assert run() == "21 0\n"


def test_a_read_only_install_without_a_home_still_works(tmp_path: Path) -> None:
    """As under a service user: the kernels' folder and the home cannot be written to."""
    package = tmp_path / "site"
    package.mkdir()
    module = package / "frozen.py"
    module.write_text(
        "from anabranch.kernels.compiled import compiled\n\n@compiled\ndef double(x):\n    return 2 * x\n\nprint(double(21))\n"
    )
    hidden = "import numba.core.caching as c; c.CacheImpl._locator_classes = []; "  # what numba finds there: nowhere
    run = subprocess.run(
        [sys.executable, "-c", hidden + f"import sys; sys.path.insert(0, {str(package)!r}); import frozen"],
        capture_output=True, text=True, timeout=100, env={**os.environ, "HOME": "/nonexistent"}, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (0, "42\n"), run.stderr
