"""The learner's memory of what it settled: one durable line for every group that ended, written before its entry is settled.

Invariant: a record that `append` returned for is durable and stands in the log once; after an error none of that call does.
`fate` knows the newest `RECALL` identities and all that were logged since the checkpoint the learner came from, so an
entry that comes again (a crash before its acknowledgement, a server that forgot it) ends the same way and has one line. A
log has one writer: a second one is refused. Held by tests/unit/consumers/test_fate_log.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import structlog

from anabranch.consumers.fate_files import (
    Counts,
    add_counts,
    close_file,
    count_fates,
    counts_of,
    fate_files,
    file_name,
    parse_lines,
    whole_lines,
)
from anabranch.schemas.errors import FateLogError, TemporaryError
from anabranch.schemas.fates import FateRecord, Identity
from anabranch.transport.files import sync_directory

RECALL = 20_000  # identities; far more than a server can forget in its last second
_BLOCK = 2**16

Position = tuple[int, int]  # file number, lines in it


class FateLog:
    """The log in `directory`, made if missing.

    Args:
        file_lines: a file with so many lines is followed by the next.
        since: `position` as a checkpoint knew it: everything after it is remembered, however much that is.

    Raises:
        FateLogError: another process writes to it, or the disk does not let it be opened.
    """

    def __init__(
        self, directory: Path, *, file_lines: int, since: Sequence[int] | None = None, recall: int = RECALL
    ) -> None:
        self._directory, self._file_lines, self._recall = directory, file_lines, recall
        self._known: dict[Identity, str] = {}  # oldest first
        self._fd = self._lock = -1
        self._torn = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(directory)
            self.counts: Counts = count_fates(directory)
            files = fate_files(directory)
            self._open_file(files[-1][0] if files else 1)
            self._remember(files, (since[0], since[1]) if since else None)
        except OSError as error:
            self.close()
            raise FateLogError(f"cannot open the fates of groups in {directory}: {error}") from error

    @property
    def position(self) -> Position:
        return self._number, self._lines

    def fate(self, identity: Identity) -> str | None:
        """How the delivery ended, None if it has not, as far as is remembered."""
        return self._known.get(identity)

    def append(self, records: Iterable[FateRecord]) -> None:
        """Those that are not in the log yet, durable when this returns.

        Raises:
            FateLogError: they could not be written (a full disk); none of them is in the log, and the call may be repeated.
            TemporaryError: somebody removed the log. Whoever opens it anew makes another.
        """
        new = {r.identity: r for r in records if r.identity not in self._known}
        if not new:
            return
        self._check_there()
        try:
            if self._lines >= self._file_lines:
                self._next_file()
            self._write(b"".join(r.line() for r in new.values()))
        except OSError as error:
            raise FateLogError(
                f"the fates of {len(new)} groups cannot be written to {self._directory}: {error}; "
                "they stay unsettled until there is room"
            ) from error
        self._lines += len(new)
        add_counts(self.counts, counts_of(iter(new.values())))
        self._known |= {identity: record.fate for identity, record in new.items()}
        self._forget_the_oldest()

    def close(self) -> None:
        for fd in (self._fd, self._lock):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock = -1

    def _open_file(self, number: int) -> None:
        """Go on in that file, without the line that a crash or a full disk left in half. After an error nothing has changed."""
        fd = os.open(self._directory / file_name(number), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            sync_directory(self._directory)
            lines, end = _whole(fd)
        except OSError:
            os.close(fd)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._number, self._lines, self._bytes, self._torn = fd, number, lines, end, True
        self._cut()

    def _next_file(self) -> None:
        close_file(self._directory / file_name(self._number))
        self._open_file(self._number + 1)

    def _check_there(self) -> None:
        if os.fstat(self._fd).st_nlink == 0:  # what goes there is gone, though every write succeeds
            raise TemporaryError(
                f"somebody removed {self._directory / file_name(self._number)}: put the fates of groups back, or start "
                "again without them; `anabranch ledger` then tells what they lack"
            )

    def _write(self, data: bytes) -> None:
        if self._torn:
            self._cut()
        try:
            written = 0
            while written < len(data):
                written += os.write(self._fd, data[written:])
            os.fsync(self._fd)
        except OSError:
            self._torn = True
            with contextlib.suppress(OSError):  # else before the next
                self._cut()
            raise
        self._bytes += len(data)

    def _cut(self) -> None:
        if os.fstat(self._fd).st_size != self._bytes:
            os.ftruncate(self._fd, self._bytes)
            os.fsync(self._fd)
        self._torn = False

    def _remember(self, files: Sequence[tuple[int, Path]], since: Position | None) -> None:
        pages: list[list[FateRecord]] = []
        found = unreadable = 0
        for number, path in reversed(files):
            lines = whole_lines(path)
            page = list(parse_lines(lines))
            unreadable += len(lines) - len(page)
            pages.append(page)
            found += len(page)
            if found >= self._recall and (since is None or number <= since[0]):
                break
        if unreadable:
            structlog.get_logger().warning("lines of the fate log are damaged", lines=unreadable)
        for record in itertools.chain(*reversed(pages)):
            self._known[record.identity] = record.fate
        # All of it is kept: what a checkpoint does not know must not go before that checkpoint's successor is there.
        self._recall = max(self._recall, len(self._known))

    def _forget_the_oldest(self) -> None:
        for identity in list(itertools.islice(self._known, max(0, len(self._known) - self._recall))):
            del self._known[identity]


def _lock(directory: Path) -> int:
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise FateLogError(f"another learner writes to {directory}: stop it, or wait until it has ended") from error
    return fd


def _whole(fd: int) -> tuple[int, int]:
    """Lines in the file, and bytes up to the end of the last whole one."""
    lines = end = at = 0
    while block := os.pread(fd, _BLOCK, at):
        lines += block.count(b"\n")
        if (last := block.rfind(b"\n")) >= 0:
            end = at + last + 1
        at += len(block)
    return lines, end
