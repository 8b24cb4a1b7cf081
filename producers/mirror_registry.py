"""Where the producers of a node find the memory that they share.

Invariant: at most one memory of a name is handed out to the processes that can see each other, and one is made only when
no living process holds it. The registry never owns memory: it lists who holds it (process id and descriptors), one line
per holder; lines of dead processes, and lines that make no sense, are ignored and swept. The folder belongs to this user
alone, or it is not used. Held by tests/unit/producers/test_mirror_registry.py.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from anabranch.producers.mirror_lock import FileLock
from anabranch.schemas.errors import AnabranchError

LOCK_DEADLINE_S = 10.0


class NotShared(AnabranchError):
    """This process cannot share memory with the others of its node; says why. It works alone then."""


class Memory(Protocol):
    @property
    def descriptors(self) -> tuple[int, int]:
        """Of the control memory and of the image, open in this process."""
        ...


M = TypeVar("M", bound=Memory)


@dataclass(frozen=True, slots=True)
class Holder:
    pid: int
    control: int
    image: int

    @property
    def paths(self) -> tuple[str, str]:
        return f"/proc/{self.pid}/fd/{self.control}", f"/proc/{self.pid}/fd/{self.image}"


def default_node_dir() -> Path:
    return Path(f"/dev/shm/anabranch-{os.geteuid()}")  # noqa: S108 - made with mode 0700, owner and mode are checked


def find_or_make(
    node_dir: Path, name: str, adopt: Callable[[str, str], M | None], make: Callable[[], M]
) -> tuple[M, bool]:
    """The memory called `name`, and whether it was there already; this process is a registered holder of it then.

    Args:
        adopt: opens (control path, image path) and returns the memory, or None if it is something else.
            May raise OSError.
        make: a new memory.

    Raises:
        NotShared: the folder is not this user's alone, or a living holder's descriptors cannot be opened.
        DeadlineError: another process holds the registry's lock for too long.
    """
    check_folder(node_dir)
    lock = FileLock(node_dir / f"{name}.lock", f"the registry {node_dir / name}")
    try:
        with lock.held(deadline_s=LOCK_DEADLINE_S):
            listed = _read(node_dir / f"{name}.holders")
            living = [h for h in listed if h.pid != os.getpid() and _alive(h.pid)] + [
                h for h in listed if h.pid == os.getpid()
            ]
            found: M | None = None
            hidden: OSError | None = None
            kept: list[Holder] = []
            for holder in living:
                try:
                    memory = adopt(*holder.paths) if found is None else found
                except (FileNotFoundError, ProcessLookupError):  # it closed that descriptor, or ended meanwhile
                    continue
                except OSError as error:  # not allowed, or this process has no descriptors left: it may well hold it
                    hidden = error
                    kept.append(holder)
                    continue
                if memory is not None:
                    found = memory
                    kept.append(holder)
            if found is None and hidden is not None:
                raise NotShared(
                    f"the memory of a living process cannot be opened ({hidden}); see the limit of open files, and whether "
                    "/proc is mounted hidepid"
                )
            memory = found or make()
            _write(node_dir / f"{name}.holders", [*kept, Holder(os.getpid(), *memory.descriptors)])
            return memory, found is not None
    finally:
        lock.close()


def check_folder(node_dir: Path) -> None:
    """Make it (mode 0700). Raises NotShared unless it is a folder of this user that nobody else may enter."""
    try:
        node_dir.mkdir(mode=0o700, exist_ok=True)
        found = node_dir.lstat()
    except OSError as error:
        raise NotShared(f"producer.node_dir = {node_dir} cannot be used: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise NotShared(f"producer.node_dir = {node_dir} must be a folder of this user with mode 0700")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}").stat().st_uid == os.geteuid() or os.geteuid() == 0
    except OSError:
        return False


def _read(path: Path) -> list[Holder]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    holders: dict[Holder, None] = {}
    for line in lines:
        try:
            row = json.loads(line)
            holder = Holder(row["pid"], row["control"], row["image"])
        except (ValueError, TypeError, KeyError):
            continue
        if all(type(n) is int and n >= 0 for n in (holder.pid, holder.control, holder.image)):
            holders[holder] = None
    return list(holders)


def _write(path: Path, holders: list[Holder]) -> None:
    """Replaced as a whole: a process that dies here leaves the old list."""
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(asdict(h)) + "\n" for h in dict.fromkeys(holders)))
    new.replace(path)
