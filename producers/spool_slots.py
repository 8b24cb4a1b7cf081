"""Which process has which spool: the slots of one region, `spool_directory/REGION/SLOT/`.

Invariant: a spool belongs to at most one living process, which holds an flock on SLOT/lock for as long as it lives (the
descriptor is inherited by no child). A process that starts takes the first free slot, and with it the producer id and the
sequence numbers of whoever had it. A spool that stayed free for `adopt_after_s` is left behind and may be adopted, to be
sent and removed; a removed slot is free for a new spool under a new id. Looking for free slots and removing them is done
under the region's own lock, so that nobody takes a glance for a holder.

A number is never given twice: where the machine was started anew since an id was given, or the folder is a copy of the one it
was given in (SLOT/boot), nobody goes on with it. The disk may have lost records that had been delivered, and a Redis on the
same machine all trace of them; the learner would take other groups under their numbers for what it has settled. What is there
of such a spool is adopted.
Held by tests/unit/producers/test_spool_slots.py.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog

from anabranch.producers.mirror_lock import FileLock
from anabranch.producers.spool import Spool
from anabranch.producers.spool_load import spool_exists
from anabranch.schemas.config import SpoolSection
from anabranch.schemas.errors import ConfigError, SchemaVersionError, SpoolError, TemporaryError
from anabranch.transport.files import write_atomically

ADOPT_AFTER_S = 10.0  # longer than a supervisor takes to start a process again, which then goes on with its own spool
_CLAIM_S, _GLANCE_S = 30.0, 0.5  # how long the region's lock is waited for
_MOST_SLOTS = 10_000
BOOT = Path("/proc/sys/kernel/random/boot_id")  # Linux; elsewhere a machine counts as never started anew
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A spool that is ours while `lock` is held."""

    spool: Spool
    lock: FileLock

    @property
    def folder(self) -> Path:
        return self.spool.folder

    def close(self) -> None:
        """Leave it to others, as it is."""
        self.spool.close()
        self.lock.close()


class SpoolSlots:
    def __init__(
        self,
        spool_directory: Path,
        region: str,
        section: SpoolSection,
        *,
        adopt_after_s: float = ADOPT_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = spool_directory / region
        self._region, self._section = region, section
        self._adopt_after_s, self._clock = adopt_after_s, clock
        self._free_since: dict[Path, float] = {}
        self._log = structlog.get_logger()

    def claim(self) -> Slot:
        """The spool of this process.

        Raises:
            TemporaryError: the disk is full.
            ConfigError: the folder cannot be made or written.
            DeadlineError: another process has been looking for a slot for half a minute.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._looking():
                for number in range(_MOST_SLOTS):
                    slot = self._take(f"{number:02d}")
                    if slot is not None:
                        return slot
        except OSError as error:
            what = f"the spool in {self.folder} cannot be opened: {error}"
            if error.errno in _FULL:
                raise TemporaryError(f"{what}; free some space") from error
            raise ConfigError(f"{what}; spool.dir must be a folder that this user may write") from error
        raise ConfigError(f"{self.folder} holds {_MOST_SLOTS} spools that are in use or unreadable; move old ones away")

    def adopt(self, *, ours: Collection[Path]) -> Slot | None:
        """A spool whose process has gone for good, if there is one; `ours` are the folders to leave alone. Raises OSError;
        DeadlineError: another process is looking at this moment."""
        with self._looking(_GLANCE_S):
            now = self._clock()
            for folder in sorted(path for path in self.folder.iterdir() if path.is_dir() and path not in ours):
                lock = self._try_lock(folder)
                if lock is None or not spool_exists(folder):
                    self._free_since.pop(folder, None)
                    if lock is not None:
                        lock.close()
                    continue
                if now - self._free_since.setdefault(folder, now) >= self._adopt_after_s:
                    del self._free_since[folder]
                    spool = self._open(folder)
                    if spool is not None:
                        return Slot(spool, lock)
                    self._free_since[folder] = float("inf")  # unreadable: said once
                lock.close()
        return None

    def remove(self, slot: Slot) -> None:
        """Delete a spool that holds nothing any more, and its slot. Raises OSError or DeadlineError: call it again."""
        with self._looking(_GLANCE_S):
            slot.spool.remove()
            for name in ("boot", "lock"):
                (slot.folder / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # somebody put a file of theirs there
                slot.folder.rmdir()
            slot.lock.close()

    def _take(self, name: str) -> Slot | None:
        folder = self.folder / name
        folder.mkdir(exist_ok=True, mode=0o700)
        lock = self._try_lock(folder)
        if lock is None:
            return None
        try:
            if spool_exists(folder):
                same = _read(folder / "boot") == _mark(folder)
                spool = self._open(folder) if same else None
            else:
                write_atomically(folder / "boot", _mark(folder), mode=0o600)
                spool = Spool(folder, self._section, producer=f"{self._region}-{name}-{secrets.token_hex(3)}")
        except BaseException:
            lock.close()
            raise
        if spool is None:
            lock.close()
            return None
        return Slot(spool, lock)

    def _open(self, folder: Path) -> Spool | None:
        try:
            return Spool(folder, self._section)
        except (SpoolError, SchemaVersionError) as error:
            self._log.error("a spool that nobody can send is left alone", folder=str(folder), error=str(error))
            return None

    def _try_lock(self, folder: Path) -> FileLock | None:
        lock = FileLock(folder / "lock", f"the spool {folder}")
        if lock.try_lock():
            return lock
        lock.close()
        return None

    @contextlib.contextmanager
    def _looking(self, deadline_s: float = _CLAIM_S) -> Iterator[None]:
        lock = FileLock(self.folder / "lock", f"the list of spools in {self.folder}")
        try:
            with lock.held(deadline_s=deadline_s):
                yield
        finally:
            lock.close()


def _mark(folder: Path) -> bytes:
    """Of this folder since this start of the machine: a copy of it has another."""
    stat = folder.stat()
    return _read(BOOT) + b" %d:%d\n" % (stat.st_dev, stat.st_ino)


def _read(path: Path) -> bytes:
    """What is in a small file; nothing if there is none, or it cannot be read (a sandbox may hide BOOT)."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
