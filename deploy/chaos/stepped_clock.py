"""Runs the command line with a wall clock that somebody else can step: time.time() plus what a file says, in nanoseconds.

    python -I -m anabranch.deploy.chaos.stepped_clock FILE WORDS...

Invariant: only the wall clock moves; time.monotonic(), and so every deadline that is rightly kept, does not. Redis servers get
the same from libfaketime, which does not bear Python's waits (clock_nanosleep fails under it). Held by
tests/unit/deploy/chaos/test_stepped_clock.py.
"""

from __future__ import annotations

import mmap
import os
import runpy
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

_OFFSET = struct.Struct("<q")


def write_offset(path: Path, seconds: float) -> None:
    """In one write, so that no reader sees half of it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.pwrite(fd, _OFFSET.pack(int(seconds * 1e9)), 0)
    finally:
        os.close(fd)


def install(path: Path) -> Callable[[], None]:
    """From now on `time.time` and `time.time_ns` are off by what `path` says at that moment; returns what undoes it."""
    with path.open("rb") as file:
        offset = mmap.mmap(file.fileno(), _OFFSET.size, prot=mmap.PROT_READ)
    real, real_ns = time.time, time.time_ns

    def stepped_ns() -> int:
        return real_ns() + int(_OFFSET.unpack_from(offset)[0])

    def stepped() -> float:
        return real() + float(_OFFSET.unpack_from(offset)[0]) / 1e9

    time.time, time.time_ns = stepped, stepped_ns

    def undo() -> None:
        time.time, time.time_ns = real, real_ns

    return undo


if __name__ == "__main__":
    install(Path(sys.argv[1]))
    sys.argv[1:2] = []
    runpy.run_module("anabranch.cli.main", run_name="__main__", alter_sys=True)
