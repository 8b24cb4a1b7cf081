"""The spool of one producer: an append-only file queue of groups that the learner has not settled yet.

Invariant: after `append` returned, the group is in the files under the next sequence number (consecutive, never used twice
for different groups) until `release` is told that it may go, whenever the process dies; the files never hold more than
`max_bytes`. `append` either writes a whole record or none: what a full disk left of one is cut off again. A record that has
become unreadable keeps its number, and `read` gives a tombstone in its place, which the learner counts as a dead letter:
nothing behind it is held up, and nothing is lost without a count and an error in the log.
Held by tests/unit/producers/test_spool.py and tests/process/test_spool_kills.py.

One thread appends; another reads, releases and syncs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from pathlib import Path

import structlog

from anabranch.producers.spool_file import (
    LONGEST_GAP,
    RECORD_HEADER,
    SEGMENT_HEADER,
    Segment,
    read_payloads,
    record_header,
    segment_header,
    segment_name,
)
from anabranch.producers.spool_load import load_segments
from anabranch.schemas.config import SpoolSection
from anabranch.schemas.envelope import Envelope
from anabranch.schemas.errors import BackpressureError, SpoolError
from anabranch.transport.files import write_atomically

OVERHEAD = SEGMENT_HEADER + RECORD_HEADER  # of a file beyond the payload of its only record
_SEGMENTS = 4  # at least so many fit below the bound, so that room comes back in parts


def tombstone(error: SpoolError) -> bytes:
    """The payload that stands for an unreadable record: no Arrow stream, so every reader refuses it by name."""
    return b"unreadable: " + str(error).encode()


class Spool:
    """The spool in `folder`, which belongs to this process alone (see spool_slots.py).

    Args:
        producer: identity of a new spool; None opens the one that is there.

    Raises:
        SpoolError: `folder` holds no spool, or those of several producers, or files that are none of ours.
        SchemaVersionError: another program version wrote it.
        OSError: the disk refuses.
    """

    def __init__(self, folder: Path, section: SpoolSection, *, producer: str | None = None) -> None:
        self.folder = folder
        self._always_sync = section.fsync == "always"
        self._max_bytes = section.max_bytes
        self._segment_bytes = max(OVERHEAD + 1, min(section.segment_bytes, section.max_bytes // _SEGMENTS))
        self._lock = threading.RLock()  # over everything below
        self._segments: list[Segment] = []
        self._fd = -1  # of the last segment
        self._stuck = ""  # why released files are still there
        self._cut_first = False  # bytes of a failed write lie behind the last record
        self._unsynced: dict[Path, None] = {}
        self._unreadable: set[int] = set()  # numbers told in the log
        self._taken: deque[int] | None = None  # numbers whose groups are to be written again: see `renumber`
        self._log = structlog.get_logger()
        if producer is None:
            self.producer, self._segments = load_segments(folder)
            self._cut_first = True
        else:
            self.producer = producer
            self._start_segment(1)
        self._released = self._segments[0].first_seq
        self.opened_at = self.next_seq

    @property
    def next_seq(self) -> int:
        """The number that the next group gets."""
        return self._segments[-1].end_seq

    @property
    def floor(self) -> int:
        """The lowest number that is still held; `next_seq` if none is."""
        return self._released

    @property
    def bytes_used(self) -> int:
        with self._lock:
            return sum(segment.size for segment in self._segments)

    @property
    def bytes_held(self) -> int:
        """`bytes_used` less what the next append would free if it needed the room."""
        with self._lock:
            last = self._segments[-1]
            return self.bytes_used - (last.size - SEGMENT_HEADER if self._released == last.end_seq else 0)

    @property
    def unreadable(self) -> int:
        """How many records had to be replaced by a tombstone since this process opened the spool."""
        return len(self._unreadable)

    def groups(self, first: int, end: int | None = None) -> list[int]:
        """Group indices of the records from number `first` on, to `end` (exclusive; None: all)."""
        with self._lock:
            return [
                segment.groups[seq - segment.first_seq]
                for segment in self._segments
                for seq in range(max(first, segment.first_seq), min(segment.end_seq, end or segment.end_seq))
                if segment.present(seq)
            ]

    def append(self, group_index: int, payload: bytes) -> int:
        """Write one record and return its number. Never waits for anything but the disk.

        Raises:
            BackpressureError: it does not fit below `max_bytes`.
            OSError: the disk did not take it; nothing of it stays.
        """
        with self._lock:
            size = RECORD_HEADER + len(payload)
            if not self._fits(size):
                last = self._segments[-1]
                if self._released < self.next_seq or last.size == SEGMENT_HEADER:
                    raise BackpressureError(
                        f"the spool {self.folder} holds {self.bytes_used} bytes and takes no further {size}: spool.max_bytes is "
                        f"{self._max_bytes}"
                    )
                self.compact()
                if not self._fits(size):  # a file could not be removed
                    raise BackpressureError(f"the spool {self.folder} cannot make room: {self._stuck}")
            if self._needs_file(size):
                self._start_segment(self.next_seq)
            return self._write(group_index, payload)

    def _fits(self, size: int) -> bool:
        new_file = SEGMENT_HEADER if self._needs_file(size) else 0
        return self.bytes_used + size + new_file <= self._max_bytes

    def _needs_file(self, size: int) -> bool:
        last = self._segments[-1]
        grown = last.size > SEGMENT_HEADER and last.size + size > self._segment_bytes
        return grown or bool(last.damage)  # behind damage nothing is written

    def _write(self, group_index: int, payload: bytes) -> int:
        segment = self._segments[-1]
        seq, offset = segment.end_seq, segment.size
        parts = [record_header(seq, group_index, payload), payload]
        try:
            if self._fd < 0:
                self._fd = os.open(segment.path, os.O_WRONLY | os.O_CLOEXEC)
            if os.fstat(self._fd).st_nlink == 0:  # what goes there is gone, though every write succeeds
                raise FileNotFoundError(errno.ENOENT, "somebody removed the spool's file", str(segment.path))
            if self._cut_first:
                os.ftruncate(self._fd, offset)
                self._cut_first = False
            written = os.pwritev(self._fd, parts, offset)
            if written < RECORD_HEADER + len(payload):
                rest = memoryview(b"".join(parts))
                while written < len(rest):  # the next try says why it was short
                    written += os.pwrite(self._fd, rest[written:], offset + written)
            if self._always_sync:
                os.fdatasync(self._fd)
        except OSError as error:
            error.filename = error.filename or str(segment.path)
            self._cut_first = True
            with contextlib.suppress(OSError):  # else before the next write, or by whoever opens the spool next
                os.ftruncate(self._fd, offset)
                self._cut_first = False
            raise
        segment.add(offset, len(payload), group_index)
        self._unsynced[segment.path] = None
        return seq

    def _start_segment(self, first_seq: int) -> None:
        path = self.folder / segment_name(self.producer, first_seq)
        write_atomically(path, segment_header(first_seq), mode=0o600)
        self._close_file()
        others = [s for s in self._segments if s.path != path]  # an empty one may be started again
        self._segments = [*others, Segment(path, first_seq)]
        self._cut_first = False

    def read(self, first: int, *, max_bytes: int, max_records: int) -> list[Envelope]:
        """Records from number `first` on, at least one if there is one, at most `max_bytes` together (but one).

        Raises OSError: the files cannot be read for now.
        """
        with self._lock:
            segment = next((s for s in self._segments if first < s.end_seq), None)
            if segment is None:
                return []
            begin = first = max(first, segment.first_seq)
            total = 0
            while begin < min(segment.end_seq, first + max_records):
                total += segment.lengths[begin - segment.first_seq]
                if total > max_bytes and begin > first:
                    break
                begin += 1
        found = list(read_payloads(segment, first, begin - first))
        if any(isinstance(payload, SpoolError) for _, _, payload in found):
            # One at a time, and a second time: an unreadable sector costs the records that lie on it and no other.
            found = [row for seq in range(first, begin) for row in read_payloads(segment, seq, 1)]
        return [
            Envelope(self.producer, seq, group, self._checked(seq, group, payload)) for seq, group, payload in found
        ]

    def _checked(self, seq: int, group_index: int, payload: bytes | SpoolError) -> bytes:
        if isinstance(payload, bytes):
            return payload
        if seq not in self._unreadable:
            self._unreadable.add(seq)
            self._log.error(
                "a spooled group is unreadable and lost; it goes to the dead letters",
                error=str(payload), producer=self.producer, seq=seq, group_index=group_index, lost=len(self._unreadable),
            )  # fmt: skip
        return tombstone(payload)

    def release(self, below: int) -> None:
        """Groups with numbers below `below` need not be kept; the files that hold no other are removed. One that cannot be
        removed is told in the log and tried again with the next call."""
        with self._lock:
            self._released = max(self._released, min(below, self.next_seq))
            self._unreadable = {seq for seq in self._unreadable if seq >= self._released}
            self._drop_released()

    def compact(self) -> None:
        """Where nothing is kept, leave one file without records, so that whoever opens the spool next sees that. Raises
        OSError."""
        with self._lock:
            if self._released == self.next_seq and self._segments[-1].size > SEGMENT_HEADER:
                self._start_segment(self.next_seq)
            self._drop_released()

    def _drop_released(self) -> None:
        while len(self._segments) > 1 and self._segments[0].end_seq <= self._released:
            path = self._segments[0].path
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                if not self._stuck:
                    self._log.error("a file of the spool cannot be removed", path=str(path), error=str(error))
                self._stuck = str(error)
                return
            self._stuck = ""
            self._unsynced.pop(path, None)
            del self._segments[0]

    def renumber(self, first: int) -> int:
        """The stream knows numbers up to `first` - 1 of this producer, and this spool gave none from `opened_at` on before it
        was opened: its files are an older state (the machine lost power, or they were put back from a copy). Numbering goes
        on at `first`, and groups put since under numbers that are taken are written once more, beyond the bound if need be.
        Returns how many. Raises OSError: call it again."""
        with self._lock:
            if self._taken is None:
                end = self.next_seq
                if first > end + LONGEST_GAP:
                    raise SpoolError(
                        f"{self.folder} ends at {end - 1}, but the stream expects {first} of {self.producer}"
                    )
                self._start_segment(max(first, end))
                self._segments[-2].miss(first)
                self._taken = deque(range(self.opened_at, min(first, end)))
            moved = 0
            while self._taken:
                (envelope,) = self.read(self._taken[0], max_bytes=1, max_records=1)
                self._write(envelope.group_index, envelope.payload)
                self._taken.popleft()
                moved += 1
            return moved

    def sync(self) -> None:
        """fsync what was appended since the last call. Raises OSError: the disk did not take it."""
        with self._lock:
            paths, self._unsynced = self._unsynced, {}
        while paths:
            path = next(iter(paths))
            try:
                with contextlib.suppress(FileNotFoundError):
                    _sync_file(path)
            except OSError:
                with self._lock:
                    self._unsynced.update(paths)
                raise
            del paths[path]

    def close(self) -> None:
        with self._lock:
            self._close_file()

    def remove(self) -> None:
        """Delete the files of a spool that holds nothing any more."""
        self.close()
        for segment in self._segments:
            segment.path.unlink(missing_ok=True)

    def _close_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)
