"""Wheel and sdist hold the whole program, also when built from a path with a space in it, and work where nothing else is.

Built and installed offline. The links of src/anabranch must arrive as folders, with the Lua and TOML files in them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "anabranch"
LEFT_OUT = (".git", ".venv", ".cache", "runs", "dist", "build", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")


def execute(*argv: str | Path, cwd: Path) -> str:
    environ = {**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    done = subprocess.run(
        [str(a) for a in argv], cwd=cwd, env=environ, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Built:
    """`wheels`: one built from the tree, one from the sdist alone."""

    sdist: Path
    wheels: dict[str, Path]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    work = tmp_path_factory.mktemp("a path with spaces")
    tree, dist, again = work / "the tree", work / "dist", work / "from sdist"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    execute(sys.executable, "-I", "-m", "build", "--no-isolation", "--sdist", "--wheel", "-o", dist, tree, cwd=work)
    (sdist,) = dist.glob("*.tar.gz")
    (wheel,) = dist.glob("*.whl")
    shutil.rmtree(tree)  # what is installed must not lean on it
    execute(
        sys.executable, "-I", "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", again, sdist, cwd=work
    )  # fmt: skip
    (second,) = again.glob("*.whl")
    return Built(sdist, {"tree": wheel, "sdist": second})


@pytest.fixture(scope="module")
def environments(built: Built, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each wheel the interpreter of a fresh environment that holds it and nothing else."""
    pythons = {}
    for name, wheel in built.wheels.items():
        folder = tmp_path_factory.mktemp("clean") / "venv"
        execute(sys.executable, "-I", "-m", "venv", "--without-pip", folder, cwd=folder.parent)
        pythons[name] = python = folder / "bin" / "python"
        pip = (sys.executable, "-I", "-m", "pip", "--python", python)
        execute(*pip, "install", "--no-deps", "--no-compile", wheel, cwd=folder.parent)
    return pythons


@pytest.fixture(params=["tree", "sdist"])
def clean(request: pytest.FixtureRequest, environments: dict[str, Path]) -> Path:
    return environments[request.param]


def source_files() -> set[str]:
    """Every module and data file that belongs to the program, as `anabranch/...`."""
    found = set()
    for folder, _, names in os.walk(PACKAGE, followlinks=True):
        for name in names:
            if name.endswith((".py", ".conf", ".lua", ".toml", ".sh", ".html", ".css", ".js", ".json")):
                found.add(f"anabranch/{(Path(folder) / name).relative_to(PACKAGE).as_posix()}")
    return found


def test_the_wheels_hold_every_file(built: Built) -> None:
    expected = source_files()
    assert any(name.endswith(".lua") for name in expected)
    assert any(name.endswith(".toml") for name in expected)
    for wheel in built.wheels.values():
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
        assert expected - names == set()
        extra = {n for n in names if not n.startswith("anabranch-")} - expected
        assert extra == set(), "nothing of tests or caches, and no bare `kernels/` that would overwrite another's"


def test_the_sdist_holds_every_file_as_a_file(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        members = archive.getmembers()
    inside = {m.name.partition("/src/")[2] for m in members if m.isfile()}
    assert source_files() - inside == set()
    assert not [m.name for m in members if m.issym() or m.islnk()]


LIGHT = """
import importlib, pkgutil, sys
sys.path.append({site!r})  # the dependencies; behind the environment's own, so that it cannot lend its `anabranch`
import anabranch
names = ["anabranch.cli.main"]
for folder in ("schemas", "transport"):
    package = importlib.import_module("anabranch." + folder)
    names += [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    module = importlib.import_module(name)
    print(name, module.__file__)
"""


def test_light_modules_come_from_the_installed_package(clean: Path) -> None:
    site = sysconfig.get_paths()["purelib"]
    lines = execute(clean, "-I", "-c", LIGHT.format(site=site), cwd=clean.parent).splitlines()
    origins = dict(line.split(" ", 1) for line in lines)
    assert {"anabranch.schemas.config.load", "anabranch.schemas.trajectory", "anabranch.transport.scripts"} <= set(
        origins
    )
    assert not [name for name, path in origins.items() if not path.startswith(str(clean.parent.parent))]


DATA = """
import sys
sys.path.append({site!r})
from importlib.resources import files
from anabranch.cli.main import main
import anabranch
for folder, pattern in (("transport/lua", ".lua"), ("deploy/presets", ".toml"), ("deploy/redis", ".conf")):
    found = [f for f in files("anabranch").joinpath(folder).iterdir() if f.name.endswith(pattern)]
    assert found and all(f.read_text() for f in found), folder
main(["config"])
"""


def test_data_files_are_found_and_the_command_line_works(clean: Path) -> None:
    site = sysconfig.get_paths()["purelib"]
    shown = execute(clean, "-I", "-c", DATA.format(site=site), cwd=clean.parent)
    assert shown.startswith("[run]")
    assert (clean.parent / "anabranch").exists(), "the console script"


def test_alone_it_says_its_version(clean: Path) -> None:
    """No dependency is needed for that, and none is there."""
    program = "import importlib.metadata as m, anabranch; print(anabranch.__version__ == m.version('anabranch'))"
    assert execute(clean, "-I", "-c", program, cwd=clean.parent) == "True\n"
    missing = "import importlib.util; print(importlib.util.find_spec('numpy'))"
    assert execute(clean, "-I", "-c", missing, cwd=clean.parent) == "None\n"
