"""A file or folder that is made aside and appears under its name when it is whole.

Invariant: until `commit` the target is as it was; after it the target is the new content, also after a power cut. One
process at a time makes a given target. What a killed one left aside is reused or removed by the next that makes the same
target, and by nobody else's. Held by tests/unit/transport/test_aside.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from anabranch.schemas.errors import TemporaryError, UsageError
from anabranch.transport.files import sync_directory

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


class Aside:
    """Makes `target` at `path` beside it. Use it as a context manager; without `commit` nothing of it stays.

    Args:
        folder: make a folder, else a file. Both are empty at the start.

    Raises:
        UsageError: the folder that `target` should be in does not exist; `target` is a device, a pipe or a socket.
        TemporaryError: another process makes the same target.
        OSError: it cannot be written there.
    """

    def __init__(self, target: Path, *, folder: bool = False) -> None:
        if target.name in ("", ".."):
            raise UsageError(f"{target} is no name for something new")
        refuse_special(target)
        self.target = target = real_target(target)
        self.path = target.with_name(f".{target.name}.part")
        self._folder = folder
        self._committed = False
        self._fd = -1  # holds the lock

    def __enter__(self) -> Self:
        if not self.target.parent.is_dir():
            raise UsageError(f"{self.target}: there is no folder {self.target.parent}")
        try:
            with _undisturbed():
                while self._fd < 0:
                    self._fd = self._open()
        except BaseException:  # Ctrl-C that had to wait comes here
            self.__exit__(None, None, None)
            raise
        return self

    def commit(self, *, replace: bool = False) -> None:
        """Give it its name; the files of a folder must have been synced. The file is synced here.

        Raises:
            UsageError: `target` exists, and `replace` is not set or it is of the other kind.
        """
        os.fsync(self._fd)
        refuse_existing(self.target, replace=replace, folder=self._folder)
        with _undisturbed():
            if self._folder and self.target.exists():
                self._exchange()
            else:
                os.rename(self.path, self.target)
            self._committed = True
        sync_directory(self.target.parent)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with _undisturbed():
            fd, self._fd = self._fd, -1
            if fd < 0:
                return
            try:
                if not self._committed:
                    _remove(self.path)
            finally:
                os.close(fd)

    def _open(self) -> int:
        """The descriptor of the empty file or folder aside, locked; -1 if another process just took it away."""
        if self._folder:
            self.path.mkdir(exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY if self._folder else os.O_RDWR | os.O_CREAT
        fd = os.open(self.path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = os.stat(self.path, follow_symlinks=False)
            if there.st_ino != os.fstat(fd).st_ino:
                raise FileNotFoundError
            if self._folder:
                for entry in self.path.iterdir():
                    _remove(entry)
            else:
                os.ftruncate(fd, 0)
        except FileNotFoundError:
            os.close(fd)
            return -1
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise TemporaryError(f"{self.target}: another process is making it; wait for its end") from error
            raise
        return fd

    def _exchange(self) -> None:
        """Swap the new folder with the present one, in one step where the system can, and remove the old one."""
        libc = ctypes.CDLL(None, use_errno=True)
        swap = getattr(libc, "renameat2", None)
        names = os.fsencode(self.path), os.fsencode(self.target)
        if swap is None or swap(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) != 0:
            old = self.path.with_suffix(".old")
            _remove(old)
            os.rename(self.target, old)
            os.rename(self.path, self.target)
            _remove(old)
        else:
            _remove(self.path)


def real_target(path: Path) -> Path:
    """`path`, or what it leads to if it is a link: writing that leaves the link as it is."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def refuse_special(path: Path) -> None:
    """Raises UsageError if something is at `path`, after links, that is neither a regular file nor a folder."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        mode = 0
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UsageError(f"{path} is not a regular file (a device, a pipe, a socket or a ring of links)")


def refuse_existing(target: Path, *, replace: bool, folder: bool) -> None:
    """Raises UsageError if `target` exists and may not, or could not, be replaced by a file (or a `folder`)."""
    if not os.path.lexists(target):
        return
    if not replace:
        raise UsageError(f"{target} exists; --force replaces it")
    refuse_special(target)
    if target.is_dir() != folder:
        raise UsageError(f"{target} is a {'folder' if target.is_dir() else 'file'}; remove it first")


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the block is left: what it makes or removes is whole then.

    By Python's handlers, not by the thread's mask: a library's thread would take the signal, and Python would still run
    the handler here.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if came:
            signal.raise_signal(came[0])


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
