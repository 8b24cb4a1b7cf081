"""The command line and everything light start without a heavy library, alone in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "vllm", "deepspeed", "transformers", "matplotlib", "triton", "numba", "reasoning_gym")


def loaded(program: str) -> str:
    """Which heavy libraries are loaded after `program`, each with who asked for it first."""
    check = f"""
import sys, traceback
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in {HEAVY!r}:
            stack = [f.filename for f in traceback.extract_stack() if "anabranch" in f.filename or "work" in f.filename]
            print("LOADS", name, "from", (stack or ["?"])[-1])
        return None
sys.meta_path.insert(0, Watch())
{program}
print("DONE")
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", check], capture_output=True, text=True, timeout=60, check=False, cwd="/"
    )
    assert "DONE" in done.stdout, done.stdout + done.stderr
    return "\n".join(line for line in done.stdout.splitlines() if line.startswith("LOADS"))


def importing(folder: str) -> str:
    parent = ROOT / ("src/anabranch" if folder == "cli" else "")
    names = sorted(
        ".".join(["anabranch", *path.relative_to(parent).with_suffix("").parts])
        for path in (parent / folder).rglob("*.py")
    )
    assert names
    return "\n".join(f"import {name.removesuffix('.__init__')}" for name in names)


@pytest.mark.parametrize("folder", ["transport", "cli"])
def test_light_folders_load_nothing_heavy(folder: str) -> None:
    assert loaded(importing(folder)) == ""


def test_schemas_load_neither_redis_nor_anything_of_the_other_folders() -> None:
    program = (
        importing("schemas")
        + "\nassert 'redis' not in sys.modules\n"
        + "others = [m for m in sys.modules if m.startswith('anabranch.') and not m.startswith('anabranch.schemas')]\n"
        + "assert not others, others\n"
    )
    assert loaded(program) == ""


def test_light_commands_load_nothing_heavy() -> None:
    program = """
from anabranch.cli.main import main
for arguments in (["--help"], ["config"], ["config", "--keys"], ["demo", "--help"], ["produce", "--help"]):
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 0, (arguments, code)
"""
    assert loaded(program) == ""


def test_the_check_itself_sees_a_heavy_library() -> None:
    assert "LOADS matplotlib" in loaded("import matplotlib")
