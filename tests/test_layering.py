"""The folders are one namespace, and imports go one way."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("consumers", "deploy", "kernels", "learner", "producers", "schemas", "transport")


@pytest.fixture(scope="module")
def check_imports() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_imports", ROOT / "scripts" / "check_imports.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def view(tmp_path: Path, check_imports: ModuleType) -> Path:
    return check_imports.make_view(tmp_path)


def test_the_import_rules_hold(check_imports: ModuleType, view: Path) -> None:
    done = check_imports.lint(view.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


VIOLATIONS = {
    "schemas/x.py": "import anabranch.transport.retry",
    "kernels/x.py": "import anabranch.transport.retry",
    "learner/x.py": "import anabranch.producers.outbox",
    "learner/y.py": "import vllm",
    "consumers/x.py": "def f():\n    import anabranch.learner.feed",
    "producers/x.py": "from anabranch.consumers import reader",
    "producers/y.py": "import deepspeed.comm",
    "schemas/config/x.py": "import torch",
}


def test_a_violation_is_found_in_every_folder(check_imports: ModuleType, view: Path) -> None:
    """The check sees the folders behind the links: one that saw nothing would find nothing."""
    for module, statement in VIOLATIONS.items():
        (view / module).write_text(statement + "\n")
    done = check_imports.lint(view.parent)
    assert done.returncode == 1, done.stderr
    assert "0 kept, 5 broken" in done.stdout
    for module, statement in VIOLATIONS.items():
        importer = "anabranch." + module.removesuffix(".py").replace("/", ".")
        imported = "anabranch.consumers.reader" if "reader" in statement else statement.split()[-1]
        imported = imported.replace("deepspeed.comm", "deepspeed")
        assert f"{importer} -> {imported}" in done.stdout


def test_the_namespace_is_a_link_for_every_folder() -> None:
    package = ROOT / "src" / "anabranch"
    links = {path.name: path.readlink() for path in package.iterdir() if path.is_symlink()}
    assert links == {name: Path("../..") / name for name in FOLDERS}, "relative, so that the tree can be moved"
    for name in FOLDERS:
        assert (package / name).resolve() == ROOT / name


def test_root_folders_are_no_packages_of_their_own() -> None:
    """A root package `kernels` would shadow the PyPI package of that name, which transformers imports."""
    assert not [name for name in FOLDERS if (ROOT / name / "__init__.py").exists()]
    assert not (ROOT / "__init__.py").exists()


def modules() -> Iterator[Path]:
    for name in (*FOLDERS, "src/anabranch/cli"):
        yield from (ROOT / name).rglob("*.py")


def test_nobody_imports_a_root_folder_by_its_bare_name() -> None:
    """`import kernels` would work from the repository's root, and nowhere else."""
    bare = []
    for path in [*modules(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            bare += [f"{path.relative_to(ROOT)}: {n}" for n in names if n.split(".")[0] in FOLDERS]
    assert not bare


def test_nothing_is_unpickled() -> None:
    """No pickle on any wire, nor in any file that somebody else could have written. (Its error classes do no harm.)"""
    found = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                bad = node.value.id in ("pickle", "dill", "marshal", "shelve") and not node.attr.endswith("Error")
            elif isinstance(node, ast.ImportFrom):
                bad = node.module in ("pickle", "dill", "marshal", "shelve")
            elif isinstance(node, ast.keyword):
                wanted = {"allow_pickle": False, "weights_only": True}
                bad = node.arg in wanted and ast.unparse(node.value) != str(wanted[node.arg])
            else:
                bad = False
            if bad:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


def test_modules_stay_small_enough_to_read() -> None:
    """About 300 lines. A file on this list should be split, and none added."""
    too_long = {str(p.relative_to(ROOT)): n for p in modules() if (n := len(p.read_text().splitlines())) > 400}
    assert not too_long


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(p.relative_to(ROOT)) for p in modules() if p.read_text() and not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert not silent


def test_the_tests_that_modules_name_exist() -> None:
    """A module's first paragraph names the test that holds its invariant."""
    missing = []
    for path in modules():
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        for word in doc.replace("\n", " ").split():
            name = word.strip(".,;()`")
            if name.startswith("tests/") and not (ROOT / name).exists():
                missing.append(f"{path.relative_to(ROOT)} names {name}")
    assert not missing
