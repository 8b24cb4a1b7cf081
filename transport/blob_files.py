"""Writing a chunk into a directory that other processes read and write at the same time.

Invariant: under its name a chunk is whole, also after a power cut, and whoever writes the same chunk at the same time
does no harm. What a killed writer left aside is removed by a later one. Held by tests/contract/test_blob_store.py.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

from anabranch.transport.files import sync_directory

_FORGOTTEN_S = 3600.0


def write_durably(target: Path, content: bytes | Iterable[bytes], *, aside: Path) -> None:
    """Write into the folder `aside`, fsync, rename to `target`. Raises OSError; nothing is left behind then."""
    if not aside.is_dir():
        make_durably(aside)
    if not target.parent.is_dir():
        make_durably(target.parent)
        _sweep(aside)  # now and then: as often as a folder is new
    written = aside / f"{uuid.uuid4().hex}.tmp"
    try:
        fd = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with open(fd, "wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(written, target)
    except OSError:
        with contextlib.suppress(OSError):
            written.unlink(missing_ok=True)
        raise
    sync_directory(target.parent)


def make_durably(folder: Path) -> None:
    """Make `folder` and those above it, each durable in the one above. Raises OSError."""
    missing = [folder]
    while not missing[-1].parent.is_dir():
        missing.append(missing[-1].parent)
    for one in reversed(missing):
        one.mkdir(exist_ok=True)
        sync_directory(one.parent)


def _sweep(aside: Path) -> None:
    old = time.time() - _FORGOTTEN_S
    with contextlib.suppress(OSError):
        for left in aside.iterdir():
            with contextlib.suppress(OSError):
                if left.stat().st_mtime < old:
                    left.unlink()
