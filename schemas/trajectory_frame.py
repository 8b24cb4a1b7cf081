"""The bytes between which our own writer puts the columns of a batch: Arrow's IPC stream, as far as it depends on lengths alone.

Invariant: `find_frame` takes a payload only if all of it but the columns' own bytes is what `pyarrow` of this version writes
for columns of those lengths, so that there is nothing in it for a parser to judge; any other payload, good or bad, is
Arrow's. Held by tests/property/test_trajectory_codec.py and tests/property/test_trajectory_fuzz.py.

Lengths are counted by *sizes*: [1, rows, then for every list of the schema how many values all of its rows hold, and for every
string column how many bytes]. The length of each buffer is linear in one of them, and of a dozen kinds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

import pyarrow as pa

from anabranch.schemas.trajectory_schema import SCHEMA

SCHEMA_MESSAGE = SCHEMA.serialize().to_pybytes()  # an IPC stream: this, a message per batch, and the end mark
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_ONE, _ROWS = 0, 1


@dataclass(frozen=True, slots=True)
class Place:
    """Of a column, or of the values of a list. `buffer`: the first one behind its validity, which is always empty: values, or the
    offsets of a list or string, whose data are next. `size`: of how many values or bytes those data are."""

    buffer: int
    size: int


@dataclass(frozen=True, slots=True)
class Frame:
    """`starts`: where in the body (the payload from `BODY` on) each buffer begins, children behind their parents, and where the
    last ends. `sizes`: see above."""

    starts: list[int]
    sizes: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.sizes[_ROWS]


class _Length(NamedTuple):
    """Of a buffer: `extra` bytes, and `each` for every one of a size."""

    each: int
    size: int
    extra: int = 0


_NOTHING = _Length(0, _ROWS)


class _Walk:
    """Visits the nodes and buffers of the schema in Arrow's order."""

    def __init__(self) -> None:
        self.nodes: list[int] = []  # the size that is each one's length
        self.buffers: list[_Length] = []
        self.read_at: list[tuple[str, int]] = []  # sizes from the third on: the node or buffer that tells it
        self.places = {}
        for field in SCHEMA:
            self.places[field.name] = self._visit(field.type, _ROWS)

    def _visit(self, kind: pa.DataType, length: int) -> Place:
        self.nodes.append(length)
        self.buffers.append(_NOTHING)  # validity
        at, size = len(self.buffers), length
        if pa.types.is_struct(kind):
            for field in kind:
                self._visit(field.type, length)
        elif pa.types.is_list(kind):
            self.buffers.append(_Length(4, length, 4))
            size = self._count("node", len(self.nodes))
            self._visit(kind.value_type, size)
        elif pa.types.is_string(kind):
            self.buffers.append(_Length(4, length, 4))
            size = self._count("buffer", len(self.buffers))
            self.buffers.append(_Length(1, size))
        else:
            self.buffers.append(_Length(kind.bit_width // 8, length))
        return Place(at, size)

    def _count(self, where: str, at: int) -> int:
        self.read_at.append((where, at))
        return 1 + len(self.read_at)


class _Message:
    """Where in a batch's message, in words of 8 bytes, the numbers stand that depend on lengths.

    Its flatbuffer (Message.fbs of Arrow): a Message has header (2) and bodyLength (3), a RecordBatch length (0), nodes (1:
    length, null count each) and buffers (2: offset, length each).
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        message = self._follow(8)  # behind the mark and the message's own length
        batch = self._follow(self._field(message, 2))
        self.body = self._field(message, 3) // 8
        self.rows = self._field(batch, 0) // 8
        self.nodes = (self._follow(self._field(batch, 1)) + 4) // 8
        self.buffers = (self._follow(self._field(batch, 2)) + 4) // 8

    def _follow(self, at: int) -> int:
        (offset,) = struct.unpack_from("<I", self._data, at)
        return at + int(offset)

    def _field(self, table: int, number: int) -> int:
        (back,) = struct.unpack_from("<i", self._data, table)
        (offset,) = struct.unpack_from("<H", self._data, table - back + 4 + 2 * number)
        return table + int(offset)


def _sample_message() -> bytes:
    """The message of a batch with one row, without its body."""
    columns = [
        pa.array([[] if pa.types.is_list(f.type) else "" if pa.types.is_string(f.type) else 0], f.type) for f in SCHEMA
    ]
    message = pa.RecordBatch.from_arrays(columns, schema=SCHEMA).serialize().to_pybytes()
    (length,) = struct.unpack_from("<i", message, 4)
    return bytes(message[: 8 + length])


_WALK = _Walk()
PLACES = _WALK.places
_SAMPLE = _sample_message()
_AT = _Message(_SAMPLE)
_HEAD, BODY = len(SCHEMA_MESSAGE), len(SCHEMA_MESSAGE) + len(_SAMPLE)
_KINDS = sorted(set(_WALK.buffers) - {_NOTHING})


def _teller() -> Callable[[bytes | memoryview], tuple[int, ...]]:
    """Takes the words that tell the sizes, all but the first, out of a payload."""
    told_at = [
        _AT.rows, *((_AT.nodes if where == "node" else _AT.buffers + 1) + 2 * at for where, at in _WALK.read_at)
    ]  # fmt: skip
    words = struct.Struct("<" + "".join("q" if at in told_at else "8x" for at in range(max(told_at) + 1)))
    in_order = itemgetter(*map(sorted(told_at).index, told_at))
    return lambda payload: in_order(words.unpack_from(payload, _HEAD))


_told = _teller()


def _writer() -> Callable[[Sequence[int], Sequence[int], Sequence[int]], bytes]:
    """Writes what is before the body, from the sizes, the lengths of `_KINDS`, and where buffers begin and the last ends."""
    sizes, kinds, buffers = 2 + len(_WALK.read_at), len(_KINDS), len(_WALK.buffers)
    zero, starts = sizes + kinds, sizes + kinds + 1  # all numbers that occur, side by side: where each is
    numbers = {_AT.rows: _ROWS, _AT.body: starts + buffers}
    for i, size in enumerate(_WALK.nodes):
        numbers[_AT.nodes + 2 * i] = size
    for i, length in enumerate(_WALK.buffers):
        numbers[_AT.buffers + 2 * i] = starts + i
        numbers[_AT.buffers + 2 * i + 1] = zero if length is _NOTHING else sizes + _KINDS.index(length)
    form, order, constants = f"<{_HEAD}s", [starts + buffers + 1], [SCHEMA_MESSAGE]
    for at in range(len(_SAMPLE) // 8):
        constant = _SAMPLE[8 * at : 8 * at + 8]
        if at in numbers:
            form += "q"
            order.append(numbers[at])
        elif any(constant):
            form += "8s"
            order.append(starts + buffers + 1 + len(constants))
            constants.append(constant)
        else:
            form += "8x"
    pack, in_order, always = struct.Struct(form).pack, itemgetter(*order), tuple(constants)
    return lambda told, lengths, begins: pack(*in_order((*told, *lengths, 0, *begins, *always)))


_written = _writer()
_lengths_of_buffers = itemgetter(
    *(len(_KINDS) if length is _NOTHING else _KINDS.index(length) for length in _WALK.buffers)
)


def frame_of(sizes: Sequence[int]) -> tuple[bytes, list[int], int]:
    """What is before the body of a batch of such sizes; where in the body each buffer begins; and the body's length."""
    lengths = [extra + each * sizes[size] for each, size, extra in _KINDS]
    padded = [(length + 7) & -8 for length in lengths]
    starts = list(accumulate(_lengths_of_buffers([*padded, 0]), initial=0))
    return _written(sizes, lengths, starts), starts, starts[-1]


def find_frame(payload: bytes | memoryview) -> Frame | None:
    """Where the columns are, if our own writer of this version could have left this payload; None for all others. What the
    columns hold, offsets included, is not looked at."""
    if len(payload) < BODY:
        return None
    sizes = (1, *_told(payload))
    if min(sizes) < 0 or sizes[_ROWS] == 0 or max(sizes) > len(payload):
        return None
    head, starts, length = frame_of(sizes)
    if bytes(payload[:BODY]) != head or bytes(payload[BODY + length :]) != END_OF_STREAM:
        return None
    return Frame(starts, sizes)
