"""Small spools that are closed when their test ends, and streams that fail as told."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from anabranch.producers.mirror_lock import FileLock
from anabranch.producers.spool import Spool
from anabranch.producers.spool_file import SUFFIX
from anabranch.schemas.config import SpoolSection
from anabranch.schemas.envelope import Envelope, open_envelope
from anabranch.schemas.errors import BackpressureError, StreamUnavailableError
from anabranch.schemas.keys import LEARNER_GROUP
from anabranch.transport.memory_stream import MemoryStream, MemoryStreamStore
from anabranch.transport.stream import ProducerProgress, TrajectoryStream


def section(**values: object) -> SpoolSection:
    return SpoolSection.model_validate({"release_after_ms": 0, **values})


def payload(number: int, size: int = 20) -> bytes:
    return (b"%d," % number * size)[:size]


def fill(spool: Spool, count: int, size: int = 20) -> None:
    """`count` records; record seq holds group index 10·seq and payload(seq)."""
    for _ in range(count):
        seq = spool.next_seq
        assert spool.append(10 * seq, payload(seq, size)) == seq


def everything(spool: Spool) -> list[Envelope]:
    found: list[Envelope] = []
    while batch := spool.read(found[-1].seq + 1 if found else spool.floor, max_bytes=200, max_records=5):
        found += batch
    return found


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


class Rough(MemoryStream):
    """Fails as `plan` says: before it stores, or after (the answer is lost). `down` fails every call."""

    def __init__(self, store: MemoryStreamStore | None = None, **options: int) -> None:
        self.store = store or MemoryStreamStore()
        super().__init__(self.store, **options)
        self.plan: list[str] = []
        self.down = False
        self.calls: list[tuple[str, int]] = []  # ("append", records) and ("progress", 0)

    def append(self, envelopes: Sequence[Envelope], *, floor: int) -> int:
        self.calls.append(("append", len(envelopes)))
        what = self.plan.pop(0) if self.plan else "ok"
        if what == "away" or self.down:
            raise StreamUnavailableError("the region cannot be reached")
        if what == "full":
            raise BackpressureError("the region is full")
        if what == "half":
            super().append(envelopes[: len(envelopes) // 2], floor=floor) if len(envelopes) > 1 else None
            raise BackpressureError("the region is full by now")
        stored = super().append(envelopes, floor=floor)
        if what == "answer lost":
            raise StreamUnavailableError("no answer")
        return stored

    def progress(self, producer: str) -> ProducerProgress:
        self.calls.append(("progress", 0))
        if self.down:
            raise StreamUnavailableError("the region cannot be reached")
        return super().progress(producer)


def fresh(stream: TrajectoryStream) -> list[Envelope]:
    """Every entry that nobody has read yet."""
    found: list[Envelope] = []
    while batch := stream.read(LEARNER_GROUP, "c", max_entries=1000, block_ms=0):
        found += [open_envelope(d.fields, max_entry_bytes=1 << 24) for d in batch]
    return found


def settle_all(stream: TrajectoryStream) -> list[Envelope]:
    """Read what is there and settle all that was ever read; returns what is new."""
    new = fresh(stream)
    held = stream.read_own_pending(LEARNER_GROUP, "c", max_entries=100_000)
    stream.settle(LEARNER_GROUP, [(d.entry_id, "trained") for d in held])
    return new


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of its own at `folder`; needs root. Raises CalledProcessError where mounting is not allowed."""
    folder.mkdir(parents=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0700", "tmpfs", str(folder)],
        check=True,
        capture_output=True,
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def closed_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Closes what spools and locks are made meanwhile, as the end of the process would, and checks that no file of a spool
    stays open that was not before."""
    made: list[Spool | FileLock] = []
    before = open_spool_files()
    for kind in (Spool, FileLock):
        monkeypatch.setattr(kind, "__init__", _noted(kind.__init__, made))
    yield
    for one in made:
        one.close()
    left = open_spool_files() - before
    assert not left, f"left open: {left}"


def _noted(real: Callable[..., None], made: list[Any]) -> Callable[..., None]:
    @functools.wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        made.append(self)

    return init


def open_spool_files() -> Counter[str]:
    """Path -> descriptors of this process, of spools and their locks."""
    found: Counter[str] = Counter()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(descriptor).removesuffix(" (deleted)")
            found[target] += target.endswith((SUFFIX, "/lock"))
    return +found
