"""Models that are made once and kept: a folder per recipe.

Invariant: `folder/NAME` is there complete and durable, or not there. It is written under another name, every file is
synced, then it is renamed; what determines it is hashed into its name, so a change of recipe or code makes another
folder and never alters one that a run is reading. Held by tests/unit/learner/test_tiny_model.py.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from anabranch.schemas.errors import DeadlineError
from anabranch.transport.files import sync_directory

RECIPE_FILE = "anabranch_recipe.json"
_ASIDE = ".making-"


def make(parent: Path, recipe: Mapping[str, Any], build: Callable[[Path], None], *, deadline_s: float = 3600.0) -> Path:
    """The folder of `recipe` under `parent`; `build(folder)` fills it if it is not there yet.

    Two processes may ask at once: one waits for the other. `recipe` is kept beside the model, in `RECIPE_FILE`.

    Raises:
        DeadlineError: another process has been making a model under `parent` for longer than `deadline_s`.
        OSError, and whatever `build` raises: nothing is left behind then.
    """
    text = json.dumps(recipe, indent=2, sort_keys=True)
    target = parent / hashlib.sha256(text.encode()).hexdigest()[:16]
    parent.mkdir(parents=True, exist_ok=True)
    with open(parent / ".lock", "w") as lock:
        _lock(lock, target, deadline_s)
        for remnant in parent.glob(f"{_ASIDE}*"):  # of a process that was killed: we hold the lock, so nobody writes it
            shutil.rmtree(remnant)
        if target.is_dir():
            return target
        aside = parent / f"{_ASIDE}{target.name}"
        aside.mkdir()
        try:
            build(aside)
            (aside / RECIPE_FILE).write_text(text + "\n", encoding="utf-8")
            for path in aside.rglob("*"):
                _sync(path)
            sync_directory(aside)
            aside.rename(target)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        sync_directory(parent)
    return target


def code_version(*modules: ModuleType) -> str:
    """A hash of the source of `modules`: another text, another model."""
    digest = hashlib.sha256()
    for module in modules:
        digest.update(inspect.getsource(module).encode())
    return digest.hexdigest()[:16]


def _lock(file: IO[str], target: Path, deadline_s: float) -> None:
    """Held until `file` is closed, or the process dies."""
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() - began > deadline_s:
                raise DeadlineError.waiting_for(
                    f"the process that makes models under {target.parent}", deadline_s
                ) from None
            time.sleep(0.2)


def _sync(path: Path) -> None:
    path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors writes for the owner alone; services run as other users
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
