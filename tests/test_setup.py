"""`make setup` on a machine that lacks something: one clear line that says what to do, and exit code 1."""

from __future__ import annotations

import collections
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
Version = collections.namedtuple("Version", "major minor micro")


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "scripts" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    monkeypatch.setattr(module, "VENV", tmp_path / "a b" / ".venv")
    monkeypatch.setattr(module, "STAMP", tmp_path / "a b" / ".venv" / "stamp")
    (tmp_path / "a b").mkdir()
    return module


def told(setup: ModuleType, capsys: pytest.CaptureFixture[str]) -> str:
    assert setup.main() == 1
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.startswith("setup: ")
    return line


def test_another_python(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "version_info", Version(3, 9, 2))
    assert "needs Python 3.11, this is 3.9.2" in told(setup, capsys)


def test_too_little_disk(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda _: usage._replace(free=10**9))
    line = told(setup, capsys)
    assert "needs 6 GB of free disk" in line
    assert "there are 1.0 GB" in line


@pytest.mark.parametrize(
    ("failing", "advice"),
    [("setuptools==", "no package index"), ("torch==", "make setup TORCH_INDEX=URL"), ("-r", "pip says which")],
)
def test_a_package_that_cannot_be_had(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failing: str, advice: str
) -> None:
    def run(argv: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        last = argv[-1] if failing != "-r" else argv[-2]
        return subprocess.CompletedProcess(argv, int(any(a.startswith(failing) for a in [*argv[5:], last])))

    monkeypatch.setattr(setup.subprocess, "run", run)
    assert advice in told(setup, capsys)
    assert not setup.STAMP.exists(), "the next run finishes the job"


@pytest.mark.parametrize("built", [True, False])
def test_what_needs_a_compiler_is_left_out_without_one(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], built: bool
) -> None:
    def run(argv: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        (setup.VENV / "bin").mkdir(parents=True, exist_ok=True)
        missing = argv[-1] in setup.UNWANTED or (argv[-1].startswith("zipnn==") and not built)
        return subprocess.CompletedProcess(argv, int(missing))

    monkeypatch.setattr(setup.subprocess, "run", run)
    assert setup.main() == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    told = [line for line in captured.out.splitlines() if "zipnn" in line]
    assert len(told) == (0 if built else 1)
    assert all("needs a C compiler" in line and "bench codec --snapshot" in line for line in told)
    assert setup.STAMP.read_text() == setup.fingerprint()


def test_no_python_at_all() -> None:
    done = subprocess.run(
        ["make", "setup", "PYTHON=no-such-python"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode != 0
    assert "no-such-python not found; install Python 3.11" in done.stderr


def test_what_is_built_is_not_built_again(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(argv: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        raise AssertionError(f"nothing is to be run, but {argv} was")

    monkeypatch.setattr(setup.subprocess, "run", run)
    setup.STAMP.parent.mkdir()
    setup.STAMP.write_text(setup.fingerprint())
    assert setup.main() == 0
    assert capsys.readouterr() == ("", "")
    setup.STAMP.write_text("of another lock")
    with pytest.raises(AssertionError, match="venv"):
        setup.main()
    assert not setup.STAMP.exists()
