"""Reading and writing delta files: the header of schemas/delta_file.py, then the chunks.

Invariant: a `DeltaFile` that could be opened has a header that passed its digest and chunks whose sizes fill the rest of
the file exactly; a chunk is handed out only after its digest was checked. `DeltaWriter` puts a file under its name when it is
whole and on disk, or leaves nothing. Held by tests/unit/transport/test_delta_file.py.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import xxhash

from anabranch.schemas.delta_file import MAGIC, PREFIX, DeltaHeader, frame_bytes
from anabranch.schemas.errors import DeltaError, ManifestError, UsageError
from anabranch.schemas.manifest import Chunk
from anabranch.transport.aside import Aside, refuse_special
from anabranch.transport.blob_store import blob_digest

_AT_ONCE_BYTES = 2**30


class DeltaFile:
    """An open delta file. Use it as a context manager; `chunk` may be called from several threads.

    Raises:
        DeltaError, ManifestError: it is no delta file, or damaged.
        UsageError: it is a device, a pipe or a socket.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_special(path)
        # somebody may put a pipe there just now: without O_NONBLOCK opening it would wait for a writer
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if stat.S_ISDIR(os.fstat(self._fd).st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise UsageError(f"{path} is not a regular file")
            self.size_bytes = os.fstat(self._fd).st_size
            prefix = self._read(0, min(PREFIX.size, self.size_bytes))
            self.header_bytes = PREFIX.size + frame_bytes(prefix)
            if self.header_bytes > self.size_bytes:
                raise DeltaError(
                    f"the file is cut short: its header has {self.header_bytes} bytes, it has {self.size_bytes}"
                )
            head = self._read(0, self.header_bytes)
            self.header = DeltaHeader.unpack(prefix, head[PREFIX.size :])
            self.identity = xxhash.xxh3_128_hexdigest(head)  # of all of the file: the header holds every chunk's digest
            sizes = [chunk.size_bytes for chunk in self.header.manifest.chunks]
            self._offsets = list(itertools.accumulate(sizes, initial=self.header_bytes))
            if self._offsets[-1] != self.size_bytes:
                raise DeltaError(f"its header tells of {self._offsets[-1]} bytes, it has {self.size_bytes}")
        except (DeltaError, ManifestError) as error:
            self.close()
            raise type(error)(f"{path}: {error}") from error
        except BaseException:
            self.close()
            raise

    def stage(self, number: int) -> range:
        """The chunks of a stage."""
        ends = list(itertools.accumulate(self.header.stages, initial=0))
        return range(ends[number], ends[number + 1])

    def chunk(self, number: int) -> bytes:
        """The bytes of a chunk. Raises DeltaError if they do not have their digest."""
        chunk = self.header.manifest.chunks[number]
        content = self._read(self._offsets[number], chunk.size_bytes)
        if blob_digest(content) != chunk.digest:
            raise DeltaError(f"{self.path}: chunk {number} of {len(self.header.manifest.chunks)} is damaged")
        return content

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _read(self, offset: int, count: int) -> bytes:
        parts = []
        while count:
            part = os.pread(self._fd, min(count, _AT_ONCE_BYTES), offset)
            if not part:
                raise DeltaError(f"{self.path} became shorter while it was read")
            parts.append(part)
            offset, count = offset + len(part), count - len(part)
        return b"".join(parts)


class DeltaWriter:
    """Collects chunks beside `path` and makes the file of them. Use it as a context manager.

    An existing delta file is replaced; another file is not.

    Raises:
        UsageError: `path` is something else than a delta file (a link counts as what it leads to), or its folder does not exist.
        TemporaryError: another process writes to `path`.
        OSError: it cannot be written, for example because the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.chunks: list[Chunk] = []
        self._aside = Aside(path)
        self._spool: IO[bytes] | None = None  # chunks wait here: the header comes first and is known last

    def __enter__(self) -> Self:
        _refuse_other_files(self._aside.target)
        self._aside.__enter__()
        try:
            self._spool = tempfile.TemporaryFile(dir=self._aside.target.parent)  # without a name: gone with the process
        except BaseException:
            self._aside.__exit__(None, None, None)
            raise
        return self

    def add(self, contents: Iterable[bytes]) -> None:
        """Append chunks."""
        assert self._spool is not None
        for content in contents:
            self._spool.write(content)
            self.chunks.append(Chunk(digest=blob_digest(content), size_bytes=len(content)))

    def finish(self, header: DeltaHeader) -> int:
        """Put the file under its name, with a `header` that lists `self.chunks`. Returns its size in bytes."""
        assert self._spool is not None
        assert header.manifest.chunks == tuple(self.chunks)
        head = header.pack()
        with self._aside.path.open("wb") as file:
            file.write(head)
            self._spool.seek(0)
            while part := self._spool.read(2**24):
                file.write(part)
        self._aside.commit(replace=True)
        return len(head) + sum(chunk.size_bytes for chunk in self.chunks)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if self._spool is not None:
                self._spool.close()
        finally:
            self._aside.__exit__(kind, error, tb)


def _refuse_other_files(path: Path) -> None:
    refuse_special(path)
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name the delta file to write")
    if path.exists():
        with path.open("rb") as file:
            start: Any = file.read(len(MAGIC))
        if start not in (MAGIC, b""):
            raise UsageError(f"{path} exists and is not a delta file; remove it first if it may go")
