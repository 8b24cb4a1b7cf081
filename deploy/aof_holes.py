"""Append-only files of Redis and Valkey with holes: found, and closed without losing a command.

Invariant: what is dropped is zero bytes between two commands, nothing else; a file that is damaged in any other way is
refused by name and left as it is. Held by tests/unit/deploy/test_aof_holes.py and tests/process/test_aof_hole.py.

How a hole comes about (seen with Valkey 9.1; Redis 7.0 opens the file in the same way): after a rewrite the server writes
to a file that it has opened without O_APPEND. A disk that fills up cuts one write short; the server takes the part back with
ftruncate, but its position stays behind the end, and once there is room the next write leaves zeros in between. The server
goes on as if nothing were wrong, and does not start again: "Bad file format reading the append only file". The server's own
check program would cut off all that came after the hole.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from anabranch.schemas.errors import AppendOnlyFileError
from anabranch.transport.files import sync_directory

_COPY_BYTES = 2**20


def find_holes(path: Path) -> list[tuple[int, int]]:
    """(offset, bytes) of each run of zeros between two commands; a command cut short at the end is left to the server.

    Raises:
        AppendOnlyFileError: something else stands where a command should begin, or inside of one.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            holes, at = list[tuple[int, int]](), 0
            while at < size:
                if data[at] == 0:
                    end = _end_of_zeros(data, at, size)
                    holes.append((at, end - at))
                    at = end
                elif (end := _command_end(data, at, size, path)) is None:
                    break
                else:
                    at = end
            return holes


def close_holes(path: Path) -> list[tuple[int, int]]:
    """Replace `path` by the same file without its holes (written aside, fsynced, renamed); returns them. The server must be
    down. Raises as `find_holes`; the file is as it was then."""
    holes = find_holes(path)
    if not holes:
        return []
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with path.open("rb") as source, aside.open("wb") as sink:
            at = 0
            for start, length in [*holes, (os.fstat(source.fileno()).st_size, 0)]:
                source.seek(at)
                left = start - at
                while left:
                    block = source.read(min(left, _COPY_BYTES))
                    if not block:
                        raise OSError(f"{path} became shorter while it was read: is its server running?")
                    left -= sink.write(block)
                at = start + length
            sink.flush()
            os.fsync(sink.fileno())
        status = path.stat()
        os.chown(aside, status.st_uid, status.st_gid)
        os.chmod(aside, status.st_mode & 0o777)
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return holes


def _end_of_zeros(data: mmap.mmap, at: int, size: int) -> int:
    while at < size:
        block = data[at : at + _COPY_BYTES]
        rest = block.lstrip(b"\0")
        if rest:
            return at + len(block) - len(rest)
        at += len(block)
    return size


def _command_end(data: mmap.mmap, at: int, size: int, path: Path) -> int | None:
    """Where the command (or annotation) at `at` ends; None if the file ends before."""
    line, end = _line(data, at)
    if end < 0:
        if size - at > 64:
            raise _damaged(path, at)
        return None
    if line.startswith(b"#"):  # a time stamp
        return end
    for _ in range(_number(line, b"*", path, at)):
        line, after = _line(data, end)
        if after < 0:
            return None
        end = after + _number(line, b"$", path, end) + 2
        if end > size:
            return None
        if data[end - 2 : end] != b"\r\n":
            raise _damaged(path, end - 2)
    return end


def _line(data: mmap.mmap, at: int) -> tuple[bytes, int]:
    """The line at `at` and where the next begins, −1 if it has no end within reason."""
    end = data.find(b"\r\n", at, at + 64)
    return (data[at:end], end + 2) if end >= 0 else (b"", -1)


def _number(line: bytes, mark: bytes, path: Path, at: int) -> int:
    digits = line[1:]
    if line[:1] != mark or not digits.isdigit():
        raise _damaged(path, at)
    return int(digits)


def _damaged(path: Path, at: int) -> AppendOnlyFileError:
    return AppendOnlyFileError(
        f"{path} is damaged at byte {at}, and not by a hole of zeros: nothing was changed. Take a copy; then the server's own "
        "check program with --fix cuts off everything from there on"
    )
