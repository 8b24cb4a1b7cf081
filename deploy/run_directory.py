"""The directory of one run: claimed by one demo at a time, resumed only under the same configuration.

Invariant: whoever holds `claim` is alone in the directory until the janitor, too, has let go of the lock, so a new
demo never meets processes of one that was killed. Held by tests/unit/deploy/test_run_directory.py and
tests/process/test_demo.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anabranch.deploy.summary import RUN_FILE
from anabranch.schemas.config import RunConfig, dump_toml
from anabranch.schemas.errors import ConfigError, TemporaryError
from anabranch.transport.files import write_atomically

CONFIG_FILE = "config.toml"
LOCK_FILE = ".lock"


@contextlib.contextmanager
def claim(directory: Path, *, deadline_s: float = 15.0) -> Iterator[int]:
    """Hold the directory, made if missing; gives the lock's descriptor.

    Raises:
        TemporaryError: another demo holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        give_up = time.monotonic() + deadline_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                owner = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
                alive = owner.isdigit() and Path(f"/proc/{owner}").exists()
                if alive or time.monotonic() > give_up:  # a dead owner's janitor needs a moment
                    raise TemporaryError(
                        f"{directory} is in use by another demo (pid {owner or 'unknown'}); stop it, or choose another --name"
                    ) from None
                time.sleep(0.1)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        yield lock
    finally:
        os.close(lock)


def is_complete(directory: Path) -> bool:
    """Whether a demo has finished its run there."""
    with contextlib.suppress(OSError, ValueError):
        return bool(json.loads((directory / RUN_FILE).read_text(encoding="utf-8")).get("completed"))
    return False


def check_same_configuration(directory: Path, config: RunConfig) -> bool:
    """Whether there is something to resume; False for a new or empty directory.

    Addresses (a demo's servers get new ones at every start) and the place of the model don't count.

    Raises:
        ConfigError: the run there has other settings; names each with both values.
    """
    try:
        text = (directory / CONFIG_FILE).read_text(encoding="utf-8")
        recorded = _flat(tomllib.loads(text))
    except FileNotFoundError:
        return False
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{directory / CONFIG_FILE} cannot be read: {error}; choose another --name") from error
    asked = _flat(tomllib.loads(dump_toml(config)))
    differ = [
        f"{key} is {recorded.get(key, 'unset')!r} there and {asked.get(key, 'unset')!r} here"
        for key in sorted(recorded.keys() | asked.keys())
        if recorded.get(key) != asked.get(key)
    ]
    if differ:
        raise ConfigError(
            f"{directory} holds a run with another configuration: {'; '.join(differ)}. "
            "Give the same settings to resume it, or choose another --name"
        )
    return True


def write_config(directory: Path, config: RunConfig) -> Path:
    """The resolved configuration, passwords masked."""
    path = directory / CONFIG_FILE
    write_atomically(path, dump_toml(config).encode())
    return path


def check_disk(path: Path, need_bytes: int, what: str) -> None:
    """Raises TemporaryError if the file system of `path` (which need not exist) has less than `need_bytes` free."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < need_bytes:
        raise TemporaryError(
            f"{what} needs {need_bytes / 1e9:.1f} GB under {place}, where {free / 1e9:.1f} GB are free; make room first"
        )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            flat.update(_flat(value, f"{path}.") or {path: {}})
        else:
            flat[path] = value
    return {k: v for k, v in flat.items() if not k.endswith(".url") and k not in ("run.dir", "model.path")}
