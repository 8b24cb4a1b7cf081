"""Reading and changing a checkpoint piece by piece, in memory bounded by the piece.

Invariant: what `read` returns is a copy of its own, made by pread and never a mapping, so that memory does not grow with
the file; `write` and `patch` reach every place where a tensor is stored (tied copies too). Any number of threads may
read and write disjoint pieces at once. While a checkpoint is open for writing nobody else opens it.
Held by tests/unit/transport/test_checkpoint_io.py.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from anabranch.schemas.errors import AnabranchError, TemporaryError
from anabranch.schemas.layout import DTYPE_BYTES, Layout
from anabranch.transport.checkpoint_files import CheckpointFiles, StoredTensor

Bits = NDArray[Any]  # flat unsigned integers as wide as the tensor's dtype
_WINDOW_ELEMENTS = 2**22  # how much of a tensor a patch reads and writes back at a time
_AT_ONCE_BYTES = 2**30  # Linux moves at most 2 GiB − 4 KiB in one call


class OpenCheckpoint:
    """A checkpoint whose files are open. Use it as a context manager.

    Args:
        refuse: what a file that is cut short under our hands raises.
        writable: open for `write` and `patch`, and lock out everybody else.
        lock: False for files that nobody else can know of.

    Raises:
        TemporaryError: somebody is writing to it (or, for a writer, reading it).
        OSError: a file cannot be opened.
    """

    def __init__(
        self, files: CheckpointFiles, *, refuse: type[AnabranchError], writable: bool = False, lock: bool = True
    ) -> None:
        self.files = files
        self._refuse = refuse
        self._fds: dict[Path, int] = {}
        try:
            for file in files.files:
                self._fds[file] = os.open(file, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
                if lock:
                    _lock(self._fds[file], file, exclusive=writable)
        except BaseException:
            self.close()
            raise

    @property
    def layout(self) -> Layout:
        return self.files.layout

    def read(self, name: str, start: int, stop: int) -> Bits:
        """Elements [start, stop) of tensor `name`, uint8/16/32/64 [stop - start], in memory of their own."""
        place = self.files.places[name][0]
        width = DTYPE_BYTES[place.dtype]
        bits = np.empty(stop - start, _uint(width))
        self._read_into(bits, place, start * width)
        return bits

    def write(self, name: str, start: int, bits: Bits) -> None:
        """Set elements [start, start + len(bits)) of tensor `name`; `bits` contiguous, of the tensor's width."""
        for place in self.files.places[name]:
            width = DTYPE_BYTES[place.dtype]
            assert bits.dtype == _uint(width)
            assert start + bits.size <= place.size_bytes // width
            fd, offset, remaining = self._fds[place.file], place.offset_bytes + start * width, _bytes(bits)
            while remaining:
                done = os.pwrite(fd, remaining[:_AT_ONCE_BYTES], offset)
                offset, remaining = offset + done, remaining[done:]

    def patch(self, name: str, indices: NDArray[np.int64], bits: Bits) -> None:
        """Set the elements at flat `indices` [K] (ascending) of tensor `name` to `bits` [K]."""
        first = 0
        while first < indices.size:
            start = int(indices[first])
            last = int(np.searchsorted(indices, start + _WINDOW_ELEMENTS))
            window = self.read(name, start, int(indices[last - 1]) + 1)
            window[indices[first:last] - start] = bits[first:last]
            self.write(name, start, window)
            first = last

    def sync(self) -> None:
        """fsync: what was written survives a power cut."""
        for fd in self._fds.values():
            os.fsync(fd)

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _read_into(self, bits: Bits, place: StoredTensor, offset_bytes: int) -> None:
        fd, offset, remaining = self._fds[place.file], place.offset_bytes + offset_bytes, _bytes(bits)
        while remaining:
            done = os.preadv(fd, [remaining[:_AT_ONCE_BYTES]], offset)
            if done == 0:
                raise self._refuse(f"{place.file} became shorter while it was read: {place.name!r} is not there")
            offset, remaining = offset + done, remaining[done:]


def _uint(width_bytes: int) -> np.dtype[Any]:
    """Named by its width: the table of kernels/delta_dtypes.py is not ours to import, transport and kernels know nothing of
    each other."""
    return np.dtype(f"u{width_bytes}")


def _bytes(bits: Bits) -> memoryview:
    """The memory of a contiguous array; empty arrays have none that could be cast."""
    return bits.data.cast("B") if bits.size else memoryview(b"")


def _lock(fd: int, file: Path, *, exclusive: bool) -> None:
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            doing = "reading or changing" if exclusive else "changing"
            raise TemporaryError(f"{file}: another `anabranch delta` is {doing} it; wait for its end") from error
        if exclusive:  # a reader may be on a file system without locks
            raise
