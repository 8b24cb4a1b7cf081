"""The envelope of a stream entry: what a reader needs before it opens the Arrow payload.

Invariant: `open_envelope(fields)` returns only if the payload is the bytes that the producer sealed (xxh3-64),
of the declared size, within the size limit, and if producer and number are such as streams and logs keep. Arrow IPC has no checksum of its own. A minor version adds fields and
changes none: it is read, and what it adds is not looked at; another major version is refused by name.
Held by tests/unit/schemas/test_envelope.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from anabranch.schemas.errors import EnvelopeError, SchemaVersionError

ENVELOPE_MAJOR = 1  # on the wire "1", or "1.MINOR" from a program that adds fields
MAX_SEQ = 10**15 - 1  # numbers of the server's scripts are doubles
_PRODUCER = re.compile(r"[!-~]{1,200}\Z")
_READABLE = re.compile(rb"%d(\.(0|[1-9][0-9]{0,8}))?\Z" % ENVELOPE_MAJOR)


@dataclass(frozen=True, slots=True)
class Envelope:
    """`producer` and `seq` make an append idempotent; `group_index` lets a reader skip without decoding. `payload`: bytes, or
    a memoryview of them (one dimension, format "B"), which is sent without a copy."""

    producer: str
    seq: int
    group_index: int
    payload: bytes | memoryview

    def seal(self) -> dict[str, bytes | memoryview]:
        """Redis stream fields."""
        return {
            "v": str(ENVELOPE_MAJOR).encode(),
            "producer": self.producer.encode(),
            "seq": str(self.seq).encode(),
            "group": str(self.group_index).encode(),
            "size": str(len(self.payload)).encode(),
            "xxh3": xxhash.xxh3_64_hexdigest(self.payload).encode(),
            "payload": self.payload,
        }


def is_producer(name: str) -> bool:
    """Whether a stream can keep the books of a producer of that name: 1 to 200 visible ASCII characters."""
    return _PRODUCER.match(name) is not None


def open_envelope(fields: Mapping[bytes, bytes], *, max_entry_bytes: int) -> Envelope:
    """The verified envelope.

    Raises:
        SchemaVersionError: another major version.
        EnvelopeError: a missing or unreadable field, a name or number that no producer has, a payload over `max_entry_bytes`, a
            size or checksum mismatch.
    """
    version = fields.get(b"v", b"none")
    if not _READABLE.match(version):
        raise SchemaVersionError(
            f"envelope version {version[:40].decode('ascii', 'replace')}; this program reads {ENVELOPE_MAJOR} "
            f"and {ENVELOPE_MAJOR}.x: the producer is newer than it, or the entry is somebody else's"
        )
    try:
        payload = fields[b"payload"]
        producer = fields[b"producer"].decode()
        seq, group, size = (int(fields[k]) for k in (b"seq", b"group", b"size"))
        checksum = fields[b"xxh3"].decode("ascii")
    except (KeyError, ValueError) as error:
        raise EnvelopeError(f"entry lacks a readable field: {error}") from error
    if not is_producer(producer):
        raise EnvelopeError(f"{producer[:40]!r} is no producer: 1 to 200 visible ASCII characters")
    if not 0 <= seq <= MAX_SEQ or group < 0:
        raise EnvelopeError(f"entry {producer}/{str(seq)[:20]} is of group {str(group)[:20]}: a number that none has")
    if len(payload) > max_entry_bytes:
        raise EnvelopeError(f"entry of {len(payload)} bytes is over the limit of {max_entry_bytes}")
    if len(payload) != size:
        raise EnvelopeError(f"entry holds {len(payload)} bytes, its envelope says {size}")
    if xxhash.xxh3_64_hexdigest(payload) != checksum:
        raise EnvelopeError(f"checksum mismatch in entry {producer}/{seq}")
    return Envelope(producer, seq, group, payload)
