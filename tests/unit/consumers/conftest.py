"""Disks with little room."""

from __future__ import annotations

import contextlib
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

SmallDisk = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def file_size_limit() -> Callable[[int], AbstractContextManager[None]]:
    """`with file_size_limit(n):` every write beyond byte n of a file fails, for root too."""

    @contextlib.contextmanager
    def limited(size_bytes: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


@pytest.fixture(params=["file size limit", "tmpfs"])
def small_disk(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    file_size_limit: Callable[[int], AbstractContextManager[None]],
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
        subprocess.run(["umount", str(folder)], check=True)
