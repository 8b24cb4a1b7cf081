"""The columns of a framed payload, one at a time.

Invariant: what a method returns lies inside its column, and is what Arrow finds there; None if the column is not plainly what
the method is for. Arrays are read-only views into the payload. Held by tests/property/test_trajectory_codec.py and
tests/property/test_trajectory_fuzz.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import gt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.schemas.trajectory_frame import BODY, PLACES, Frame


class Columns:
    """`rows` n of the batch in `payload`, which `find_frame` has framed."""

    def __init__(self, payload: bytes | memoryview, frame: Frame) -> None:
        self._view, self._starts, self._sizes = memoryview(payload).toreadonly()[BODY:], frame.starts, frame.sizes
        self.rows = frame.rows

    def numbers(self, name: str, code: str) -> tuple[Any, ...]:
        """Of a column of numbers, n of them; `code`: that of `struct`."""
        return _unpack(self.rows, code)(self._view, self._starts[PLACES[name].buffer])

    def same_number(self, name: str, code: str) -> int | None:
        """What all rows say."""
        values = self.numbers(name, code)
        return values[0] if values.count(values[0]) == self.rows else None

    def ends(self, name: str) -> tuple[int, ...] | None:
        """Offsets of a list or string column, n + 1, of which the first is 0 and the last the end of the values; those
        between may be anything."""
        found = _unpack(self.rows + 1, "i")(self._view, self._starts[PLACES[name].buffer])
        return None if found[0] or found[-1] != self._sizes[PLACES[name].size] else found

    def values(self, name: str, kind: type[np.generic]) -> NDArray[Any]:
        """Of a list column, those of all rows."""
        place = PLACES[name]
        return np.frombuffer(self._view, kind, self._sizes[place.size], self._starts[place.buffer + 2])

    def same_list(self, name: str, kind: type[np.generic]) -> NDArray[Any] | None:
        """What all rows hold."""
        values = self.values(name, kind)
        length, rest = divmod(len(values), self.rows)
        if rest or not self._are_alike(name, length, length * values.itemsize, PLACES[name].buffer + 2):
            return None
        return values[:length]

    def same_text(self, name: str) -> str | None:
        """What all rows say."""
        place = PLACES[name]
        length, rest = divmod(self._sizes[place.size], self.rows)
        if rest or not self._are_alike(name, length, length, place.buffer + 1):
            return None
        begin = self._starts[place.buffer + 1]
        return _text(self._view[begin : begin + length])

    def _are_alike(self, name: str, length: int, size: int, data: int) -> bool:
        """Whether all rows hold the same `length` values, `size` bytes in all, in buffer `data`."""
        ends, begin = self.ends(name), self._starts[data]
        if ends is None or (any(ends) if not length else ends != tuple(range(0, self.rows * length + 1, length))):
            return False
        held = bytes(self._view[begin : begin + self.rows * size])
        return held[size:] == held[: len(held) - size]

    def texts(self, name: str) -> Texts | None:
        place, ends = PLACES[name], self.ends(name)
        if ends is None:
            return None
        begin = self._starts[place.buffer + 1]
        return _texts_of(ends, self._view[begin : begin + ends[-1]])

    def names(self, name: str) -> Sequence[str] | None:
        """As `texts`, of a column that is much the same in every payload."""
        place, ends = PLACES[name], self.ends(name)
        if ends is None:
            return None
        begin = self._starts[place.buffer + 1]
        data = bytes(self._view[begin : begin + ends[-1]])
        known = _names_of if len(data) + len(ends) <= _NAMES_BYTES else _names_of.__wrapped__  # the cache stays small
        return known(ends, data)

    def same_name(self, name: str) -> str | None:
        """As `same_text`, of such a column."""
        found = self.names(name)
        return found[0] if found and found.count(found[0]) == self.rows else None

    def spans(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Epochs, versions and starts of the version spans of all rows."""
        place = PLACES["version_spans"]
        count, first = self._sizes[place.size], place.buffer + 3  # behind offsets, and validity of struct and field
        epochs = _unpack(count, "i")(self._view, self._starts[first])
        versions = _unpack(count, "q")(self._view, self._starts[first + 2])
        return epochs, versions, _unpack(count, "i")(self._view, self._starts[first + 4])


@lru_cache(maxsize=64)
def _unpack(count: int, code: str) -> Callable[[memoryview, int], tuple[Any, ...]]:
    return struct.Struct(f"<{count}{code}").unpack_from


class Texts:
    """Text behind text, and where each ends; cut when asked for."""

    __slots__ = ("_ends", "_held")

    def __init__(self, ends: tuple[int, ...], held: str | list[str]) -> None:
        self._ends, self._held = ends, held

    def cut(self) -> list[str]:
        held = self._held
        return held if isinstance(held, list) else [held[a:b] for a, b in pairwise(self._ends)]


def _texts_of(ends: tuple[int, ...], data: memoryview) -> Texts | None:
    whole = _text(data)
    if whole is None or any(map(gt, ends, ends[1:])):
        return None
    if len(whole) == ends[-1]:  # a byte each
        return Texts(ends, whole)
    found = [_text(data[a:b]) for a, b in pairwise(ends)]  # a text might end in mid-character
    sound = [text for text in found if text is not None]
    return Texts(ends, sound) if len(sound) == len(found) else None


_NAMES_BYTES = 1024


@lru_cache(maxsize=256)
def _names_of(ends: tuple[int, ...], data: bytes) -> Sequence[str] | None:
    found = _texts_of(ends, memoryview(data))
    return found.cut() if found else None


def _text(data: memoryview) -> str | None:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        return None
