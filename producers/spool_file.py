"""The files of a spool: segments of records, each record one group in the bytes that an entry of the stream will hold.

    segment  PRODUCER.FIRST_SEQ.spool: header, then records with ascending sequence numbers
    header   magic "ABSPOOL\\n", u16 version, u16 0, u32 0, u64 first seq, u64 xxh3-64 of what precedes      (32 bytes)
    record   magic "ABgr", u32 length, u64 seq, u64 group index, u64 xxh3-64 of the payload,
             u64 xxh3-64 of what precedes; then the payload                                    (40 bytes + length)

All numbers are little-endian. Invariant: `scan` finds every record whose own bytes are whole, wherever bytes around it are
cut off or overwritten, and no other; `read_payload` returns the bytes that were put or raises SpoolError. A file that ends
inside a record was being written when its process died: that record was never reported as put.
Held by tests/unit/producers/test_spool_file.py.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from anabranch.schemas.errors import SchemaVersionError, SpoolError

VERSION = 1
SUFFIX = ".spool"
MISSING = 2**64 - 1  # offset of a record that cannot be read
LONGEST_GAP = 10_000_000  # numbers missing between two records: more is no damage but nonsense

_SEGMENT_MAGIC, _RECORD_MAGIC = b"ABSPOOL\n", b"ABgr"
_SEGMENT = struct.Struct("<8sHHIQ")
_RECORD = struct.Struct("<4sIQQQ")
_CHECK = struct.Struct("<Q")
SEGMENT_HEADER = _SEGMENT.size + _CHECK.size
RECORD_HEADER = _RECORD.size + _CHECK.size
_NAME = re.compile(r"(?P<producer>[A-Za-z0-9_-]+)\.(?P<first>\d{20})\.spool")
_CHUNK = 2**20
_GONE = (errno.ENOENT, errno.EIO, errno.ESTALE, errno.EUCLEAN)  # reading again later would not help


def segment_name(producer: str, first_seq: int) -> str:
    return f"{producer}.{first_seq:020d}{SUFFIX}"


def parse_name(path: Path) -> tuple[str, int]:
    """(producer, first sequence number) of a segment's file. Raises SpoolError if it is not named like one."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise SpoolError(f"{path} is not named like a segment of a spool; move it away")
    return match["producer"], int(match["first"])


def segment_header(first_seq: int) -> bytes:
    return _sealed(_SEGMENT.pack(_SEGMENT_MAGIC, VERSION, 0, 0, first_seq))


def record_header(seq: int, group_index: int, payload: bytes) -> bytes:
    return _sealed(_RECORD.pack(_RECORD_MAGIC, len(payload), seq, group_index, xxhash.xxh3_64_intdigest(payload)))


def _sealed(head: bytes) -> bytes:
    return head + _CHECK.pack(xxhash.xxh3_64_intdigest(head))


@dataclass(frozen=True, slots=True)
class _Head:
    length: int
    seq: int
    group_index: int
    checksum: int


def _parse(head: bytes | memoryview) -> _Head | None:
    """The record header in `head` ([RECORD_HEADER]); None if it is none, or damaged."""
    magic, length, seq, group_index, checksum = _RECORD.unpack_from(head)
    if magic != _RECORD_MAGIC or _CHECK.unpack_from(head, _RECORD.size)[0] != xxhash.xxh3_64_intdigest(
        head[: _RECORD.size]
    ):
        return None
    return _Head(length, seq, group_index, checksum)


@dataclass(slots=True)
class Segment:
    """A file and where its records lie: record i has sequence number `first_seq` + i. `size` bytes of it are in use."""

    path: Path
    first_seq: int
    size: int = SEGMENT_HEADER
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    lengths: array[int] = field(default_factory=lambda: array("I"))
    groups: array[int] = field(default_factory=lambda: array("Q"))
    damage: list[str] = field(default_factory=list)  # what `scan` found, for the log

    @property
    def end_seq(self) -> int:
        return self.first_seq + len(self.offsets)

    def present(self, seq: int) -> bool:
        return self.offsets[seq - self.first_seq] != MISSING

    def add(self, offset: int, length: int, group_index: int) -> None:
        self.offsets.append(offset)
        self.lengths.append(length)
        self.groups.append(group_index)
        self.size = offset + RECORD_HEADER + length

    def miss(self, until: int) -> None:
        """The records up to `until` (exclusive) are not in the file."""
        while self.end_seq < until:
            self.offsets.append(MISSING)
            self.lengths.append(0)
            self.groups.append(0)

    def cut(self, end_seq: int) -> None:
        """Forget the records from `end_seq` on."""
        for column in (self.offsets, self.lengths, self.groups):
            del column[max(0, end_seq - self.first_seq) :]


def scan(path: Path) -> Segment:
    """The segment in `path`, from its record headers alone (payloads are verified when they are read).

    A record that the file ends in is left out, and `size` is where it begins. Bytes that are no record are passed over
    until a record with a higher number follows; they and the numbers missed are told in `damage`.

    Raises:
        SpoolError: the file is not named like a segment, or its numbers jump absurdly.
        SchemaVersionError: another format version.
        OSError: it cannot be read.
    """
    _, first_seq = parse_name(path)
    segment = Segment(path, first_seq)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        end = os.fstat(fd).st_size
        _check_segment_header(segment, os.pread(fd, SEGMENT_HEADER, 0))
        position = SEGMENT_HEADER
        while end - position >= RECORD_HEADER:
            raw = os.pread(fd, RECORD_HEADER, position)
            head = _parse(raw) if len(raw) == RECORD_HEADER else None
            if head is None or not segment.end_seq <= head.seq <= segment.end_seq + LONGEST_GAP:
                found = _resync(fd, position + 1, end, segment.end_seq)
                segment.damage.append(
                    f"{(end if found is None else found) - position} bytes at {position} are no record"
                )
                if found is None:
                    segment.size = end
                    return segment
                position = found
                continue
            if position + RECORD_HEADER + head.length > end:
                break  # torn
            if head.seq > segment.end_seq:
                segment.damage.append(f"records {segment.end_seq} to {head.seq - 1} are missing")
                segment.miss(head.seq)
            segment.add(position, head.length, head.group_index)
            position = segment.size
        segment.size = position
        return segment
    finally:
        os.close(fd)


def _check_segment_header(segment: Segment, raw: bytes) -> None:
    whole = len(raw) == SEGMENT_HEADER and raw == _sealed(raw[: _SEGMENT.size])
    if not whole:
        segment.damage.append("its header is damaged")
        return
    magic, version, _, _, first_seq = _SEGMENT.unpack_from(raw)
    if magic == _SEGMENT_MAGIC and version != VERSION:
        raise SchemaVersionError(
            f"{segment.path} has spool format {version}; this program reads {VERSION}: drain it with the program that wrote it"
        )
    if magic != _SEGMENT_MAGIC or first_seq != segment.first_seq:
        segment.damage.append("its header is that of another file")


def _resync(fd: int, start: int, end: int, expected: int) -> int | None:
    """Offset of the first whole record header at or after `start` whose number is `expected` or a little higher."""
    while end - start >= RECORD_HEADER:
        chunk = os.pread(fd, _CHUNK + RECORD_HEADER, start)
        at = chunk.find(_RECORD_MAGIC)
        while 0 <= at <= len(chunk) - RECORD_HEADER:
            head = _parse(chunk[at : at + RECORD_HEADER])
            if head is not None and expected <= head.seq <= expected + LONGEST_GAP:
                return start + at
            at = chunk.find(_RECORD_MAGIC, at + 1)
        if len(chunk) <= RECORD_HEADER:
            return None
        start += len(chunk) - RECORD_HEADER + 1
    return None


def read_payloads(segment: Segment, first: int, count: int) -> Iterator[tuple[int, int, bytes | SpoolError]]:
    """(seq, group index, payload) of `count` records of `segment` from number `first` on, in one read where they lie side by
    side; a SpoolError in place of a payload that cannot be had. Raises OSError only where a later try may help."""
    begin = first - segment.first_seq
    indices = range(begin, begin + count)
    present = [i for i in indices if segment.offsets[i] != MISSING]
    raw, low, failure = b"", 0, ""
    if present:
        low = segment.offsets[present[0]]
        high = segment.offsets[present[-1]] + RECORD_HEADER + segment.lengths[present[-1]]
        try:
            raw = _read_range(segment.path, low, high - low)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            failure = str(error)
    view = memoryview(raw)
    for i in indices:
        seq, group = segment.first_seq + i, segment.groups[i]
        if segment.offsets[i] == MISSING:
            yield seq, group, SpoolError(f"record {seq} of {segment.path} is missing")
            continue
        start = segment.offsets[i] - low
        part = view[start : start + RECORD_HEADER + segment.lengths[i]]
        head = _parse(part[:RECORD_HEADER]) if len(part) >= RECORD_HEADER else None
        payload = part[RECORD_HEADER:]
        if head is None or head.seq != seq or len(payload) != head.length:
            yield (
                seq,
                group,
                SpoolError(f"record {seq} of {segment.path} is unreadable: {failure or 'its header changed'}"),
            )
        elif xxhash.xxh3_64_intdigest(payload) != head.checksum:
            yield seq, group, SpoolError(f"record {seq} of {segment.path} is damaged: checksum mismatch")
        else:
            yield seq, group, bytes(payload)


def _read_range(path: Path, offset: int, length: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        raw = os.pread(fd, length, offset)
        while len(raw) < length and (more := os.pread(fd, length - len(raw), offset + len(raw))):
            raw += more
        return raw
    finally:
        os.close(fd)
