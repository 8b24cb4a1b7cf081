"""Disks with little room."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.limits import file_size_limit

SmallDisk = Callable[[], AbstractContextManager[None]]


@pytest.fixture(params=["file size limit", "tmpfs"])
def small_disk(
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> Iterator[tuple[Path, SmallDisk]]:
    """A folder, and `with full():` while which nothing more fits into it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if request.param == "file size limit":
        yield folder, lambda: file_size_limit(4096)  # the log of the test itself fits
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")

    @contextlib.contextmanager
    def full() -> Iterator[None]:
        filler = folder / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1024))
        try:
            yield
        finally:
            filler.unlink()

    try:
        yield folder, full
    finally:
        # Lazily: a test that failed may have left a file open there.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
