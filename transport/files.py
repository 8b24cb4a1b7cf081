"""Writing files so that a reader never sees half of one.

Invariant: after `write_atomically` returns, the file has exactly the new content, also after a power cut; if it raises,
the old content is still there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from anabranch.schemas.errors import AnabranchError, ConfigError


def write_atomically(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write aside, fsync, rename. Raises OSError; nothing is left behind then."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with open(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def read_json(path: Path, *, refuse: type[AnabranchError]) -> Any:
    """The JSON in `path`. Raises `refuse` if it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise refuse(f"{path} is not readable JSON: {error}") from error


def read_config_text(path: Path | None) -> str:
    """The text of a configuration file, "" for None. Raises ConfigError if it cannot be read."""
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --config {path}: {error}") from error


def sync_directory(folder: Path) -> None:
    """fsync a folder, so that a rename in it is durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
