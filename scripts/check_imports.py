"""Check who imports whom: the contracts under [tool.importlinter] in pyproject.toml.

    .venv/bin/python -I scripts/check_imports.py

import-linter follows no symbolic links and skips folders without `__init__.py` below one that has it, so the tree as it
stands would look empty to it, and every rule would hold. It gets a copy instead: the same modules, without links, with
an `__init__.py` in every folder. Held by tests/test_layering.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def make_view(folder: Path) -> Path:
    """Copy the package into `folder`, as import-linter wants it; returns the copy."""
    package = folder / "anabranch"
    shutil.copytree(ROOT / "src" / "anabranch", package, ignore=shutil.ignore_patterns("__pycache__"))
    for module in [*package.rglob("*.py")]:
        (module.parent / "__init__.py").touch()
    return package


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter over the copy in `folder`."""
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    argv = [sys.executable, "-c", program, str(ROOT / "pyproject.toml"), "--no-cache"]
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    return subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        make_view(Path(folder))
        done = lint(Path(folder))
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
