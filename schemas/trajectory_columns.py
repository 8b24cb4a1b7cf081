"""The columns of a batch's body as runs of numbers and texts, those that lie side by side in one go: to read and to write.

Invariant: what is read lies inside its columns, and is what Arrow finds there; None if they are not plainly what the function is
for. What is written is what Arrow writes. Held by tests/property/test_trajectory_codec.py and
tests/property/test_trajectory_fuzz.py.

Each buffer is padded to 8 bytes. A list or string column is n + 1 offsets (the first is 0, then where each row ends) and its
values. Runs of numbers, of n rows:

    indices     group index, sample index, attempt, offsets of the prompts
    spans       offsets; epoch, version and start of every span; rewards
    times       started, finished, group size; permit, scored, spooled
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import gt
from struct import Struct

_KEPT_BYTES = 4096  # more of a payload is not kept as the key of a cache
_ZEROS = [b"\0" * (-size % 8) for size in range(8)]


def padding(size: int) -> bytes:
    """What follows a buffer of `size` bytes."""
    return _ZEROS[size & 7]


def _run(*columns: tuple[int, str]) -> Struct:
    """So many numbers of a code of `struct` each, a column behind the other."""
    return Struct("<" + "".join(f"{n}{code}{'4x' if code == 'i' and n % 2 else ''}" for n, code in columns))


@lru_cache(maxsize=64)
def offsets(rows: int) -> Struct:
    return _run((rows + 1, "i"))


@lru_cache(maxsize=64)
def indices(rows: int) -> Struct:
    return _run((rows, "q"), (rows, "i"), (rows, "i"), (rows + 1, "i"))


@lru_cache(maxsize=256)
def spans(rows: int, count: int) -> Struct:
    return _run((rows + 1, "i"), (count, "i"), (count, "q"), (count, "i"), (rows, "d"))


@lru_cache(maxsize=64)
def times(rows: int) -> Struct:
    return _run((rows, "q"), (rows, "q"), (rows, "i"), (rows, "q"), (rows, "q"), (rows, "q"))


def even(rows: int, length: int) -> tuple[int, ...]:
    """Offsets of rows that are all of one length."""
    return tuple(range(0, rows * length + 1, length)) if length else (0,) * (rows + 1)


def are_alike(held: bytes, rows: int) -> bool:
    """Whether all rows hold the same bytes."""
    return held == held[: len(held) // rows] * rows


def read_same_text(view: memoryview, begin: int, rows: int, size: int) -> str | None:
    """What all rows of the string column say whose offsets are at `begin`, and which holds `size` bytes."""
    head = offsets(rows)
    length, rest = divmod(size, rows)
    if rest or head.unpack_from(view, begin) != even(rows, length):
        return None
    begin += head.size
    held = bytes(view[begin : begin + size])
    return _text(held[:length]) if are_alike(held, rows) else None


def read_names(view: memoryview, begin: int, end: int, rows: int, sizes: tuple[int, ...]) -> tuple[str, ...] | None:
    """As `read_same_text`, of string columns side by side, of such sizes and ending at `end`, that are much the same in every
    payload."""
    known = _names if end - begin <= _KEPT_BYTES else _names.__wrapped__
    return known(bytes(view[begin:end]), rows, sizes)


@lru_cache(maxsize=256)
def _names(held: bytes, rows: int, sizes: tuple[int, ...]) -> tuple[str, ...] | None:
    found, begin = [], 0
    for size in sizes:
        name = read_same_text(memoryview(held), begin, rows, size)
        if name is None:
            return None
        found.append(name)
        begin += offsets(rows).size + size + len(padding(size))
    return tuple(found)


class Texts:
    """Text behind text, and where each ends; cut when asked for."""

    __slots__ = ("_ends", "_held")

    def __init__(self, ends: tuple[int, ...], held: str | list[str]) -> None:
        self._ends, self._held = ends, held

    def cut(self) -> list[str]:
        held = self._held
        return held if isinstance(held, list) else [held[a:b] for a, b in pairwise(self._ends)]


def read_texts(view: memoryview, begin: int, rows: int, size: int) -> Texts | None:
    """The texts of a string column; arguments as of `read_same_text`."""
    head = offsets(rows)
    ends = head.unpack_from(view, begin)
    begin += head.size
    data = view[begin : begin + size]
    if ends[0] or ends[-1] != size or any(map(gt, ends, ends[1:])) or (whole := _text(data)) is None:
        return None
    if len(whole) == size:  # a byte each
        return Texts(ends, whole)
    found = [_text(data[a:b]) for a, b in pairwise(ends)]  # a text might end in mid-character
    sound = [text for text in found if text is not None]
    return Texts(ends, sound) if len(sound) == rows else None


def read_reasons(view: memoryview, begin: int, rows: int, size: int) -> Sequence[str] | None:
    """As `read_texts`, of a column that is much the same in every payload."""
    end = begin + offsets(rows).size + size
    known = _reasons if end - begin <= _KEPT_BYTES else _reasons.__wrapped__
    return known(bytes(view[begin:end]), rows, size)


@lru_cache(maxsize=256)
def _reasons(held: bytes, rows: int, size: int) -> Sequence[str] | None:
    found = read_texts(memoryview(held), 0, rows, size)
    return found.cut() if found else None


def _text(data: bytes | memoryview) -> str | None:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        return None


def texts_written(values: Sequence[str]) -> tuple[int, bytes]:
    """How many bytes these texts are, and their column. Raises UnicodeEncodeError: half a surrogate pair."""
    whole = "".join(values).encode()
    ends = list(accumulate(map(len, values), initial=0))
    if ends[-1] != len(whole):  # not a byte each
        ends = list(accumulate((len(value.encode()) for value in values), initial=0))
    return len(whole), offsets(len(values)).pack(*ends) + whole + padding(len(whole))


def same_text_written(value: str, rows: int) -> tuple[int, bytes]:
    """As `texts_written`, of rows that all say the same."""
    one = value.encode()
    whole = one * rows
    return len(whole), offsets(rows).pack(*even(rows, len(one))) + whole + padding(len(whole))


@lru_cache(maxsize=64)
def names_written(values: tuple[str, ...], rows: int) -> tuple[list[int], bytes]:
    """As `same_text_written`, of columns side by side, for names that hardly change from group to group."""
    columns = [same_text_written(value, rows) for value in values]
    return [size for size, _ in columns], b"".join(column for _, column in columns)
