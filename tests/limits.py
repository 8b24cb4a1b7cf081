"""A disk that is full, for one block of one test."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """Inside, every write beyond byte `size_bytes` of a file fails (EFBIG), for root too. The test runner's own output is
    a file as well: keep the block free of its code (no fixture that yields inside, no print)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
