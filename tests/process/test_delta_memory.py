"""Memory does not grow with the model: a checkpoint four times as large as the limit, one tensor of it alone larger."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
LIMIT_KB = 256 * 1024
TENSORS = {
    "model.embed_tokens.weight": (2**14, 2**13 + 2**12),
    **{f"model.layers.{i}.w": (2**12, 2**12) for i in range(20)},
}
ELEMENTS = sum(rows * columns for rows, columns in TENSORS.values())

# the peak of this very process: getrusage would count the parent's memory between fork and exec
MEASURED = """
import re, sys
from pathlib import Path
from anabranch.cli.main import main
from anabranch.kernels.delta_plan import plan_jobs
plan_jobs.__kwdefaults__["chunk_elements"] = int(sys.argv[1]) or plan_jobs.__kwdefaults__["chunk_elements"]
code = main(sys.argv[2:])
print("peak", re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
sys.exit(code)
"""


def peak_kb(folder: Path, *arguments: str, cut: int = 0) -> int:
    """`cut`: elements of a job, if not as many as usual."""
    command = [sys.executable, "-I", "-c", MEASURED, str(cut), "delta", *arguments, "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    peak = re.search(r"^peak (\d+)$", done.stdout, re.MULTILINE)
    assert peak is not None
    return int(peak[1])


def write(path: Path, every: int) -> Path:
    """A bf16 checkpoint of zeros, with one bit set in each `every`-th element; what is zero takes no room on the disk."""
    header, end = {}, 0
    for name, shape in TENSORS.items():
        begin, end = end, end + 2 * shape[0] * shape[1]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        start = file.tell()
        file.truncate(start + end)
        for element in range(0, ELEMENTS, every):
            file.seek(start + 2 * element)
            file.write(b"\1")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`a`, `b` and `c`, the deltas between them, and compiled kernels: their compilation has a peak of its own."""
    folder = tmp_path_factory.mktemp("large")
    sizes = [
        write(folder / name, every).stat().st_size for name, every in (("a", ELEMENTS), ("b", 70_001), ("c", 50_021))
    ]
    assert min(sizes) > 4 * LIMIT_KB * 1024
    assert 2 * TENSORS["model.embed_tokens.weight"][0] * TENSORS["model.embed_tokens.weight"][1] > LIMIT_KB * 1024
    peak_kb(folder, "diff", "a", "b", "-o", "ab")
    peak_kb(folder, "diff", "b", "c", "-o", "bc")
    peak_kb(folder, "verify", "ab", "--base", "a")
    yield folder
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    "arguments",
    [
        ("diff", "a", "b", "-o", "ab"),
        ("diff", "--anchor", "b", "-o", "anchor"),
        ("merge", "ab", "bc", "-o", "ac", "--base", "a"),
        ("verify", "ab", "--base", "a", "--result", "b"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_commands_that_write_no_checkpoint(folder: Path, arguments: tuple[str, ...]) -> None:
    assert peak_kb(folder, *arguments) < LIMIT_KB


def test_commands_that_write_a_checkpoint(folder: Path) -> None:
    assert peak_kb(folder, "apply", "a", "ab", "-o", "out") < LIMIT_KB
    assert peak_kb(folder, "apply", "out", "bc", "--in-place") < LIMIT_KB
    assert peak_kb(folder, "verify", "bc", "--result", "out") < LIMIT_KB


def test_files_that_were_cut_in_other_places(folder: Path) -> None:
    """Of two stages, so that what lies around a job is held with it."""
    for old, new in ("ab", "bc"):
        peak_kb(folder, "diff", old, new, "-o", f"{old}{new}.cut", cut=3_000_000)
    assert peak_kb(folder, "merge", "ab.cut", "bc.cut", "-o", "ac.cut") < LIMIT_KB
    assert peak_kb(folder, "verify", "ac.cut", "--base", "a", "--result", "c") < LIMIT_KB
    assert peak_kb(folder, "merge", "ab.cut", "bc", "-o", "ac.anew", "--base", "a") < LIMIT_KB
