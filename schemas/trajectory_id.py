"""The name of a trajectory, `REGION/PRODUCER/SEQ/SAMPLE`; without SAMPLE that of its group. Pure.

Invariant: printing and parsing are each other's inverse, whatever characters region and producer have: all but letters, digits
and `_.-~` are percent-encoded (as `url_encode` of DuckDB does, which makes the same names in views), so an id has exactly three
slashes, no blanks and no control characters, and goes into a path or a URL as it is. Held by
tests/property/test_trajectory_id.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from anabranch.schemas.errors import UsageError
from anabranch.schemas.fates import Identity

_NUMBER = re.compile(r"(0|[1-9][0-9]{0,18})\Z")
_PART = re.compile(r"([A-Za-z0-9_.~-]|%[0-9A-F]{2})+\Z")


@dataclass(frozen=True, slots=True, order=True)
class TrajectoryId:
    """`producer`: identity of the spool that sent it, `seq`: of that producer. `sample` None: the whole group."""

    region: str
    producer: str
    seq: int
    sample: int | None = None

    def __str__(self) -> str:
        name = f"{encode_part(self.region)}/{encode_part(self.producer)}/{self.seq}"
        return name if self.sample is None else f"{name}/{self.sample}"

    @property
    def group(self) -> TrajectoryId:
        return TrajectoryId(self.region, self.producer, self.seq)

    @property
    def identity(self) -> Identity:
        """As the fate log names the group."""
        return self.region, self.producer, self.seq


def encode_part(part: str) -> str:
    """A region or producer as a part of an id."""
    return quote(part, safe="", errors="surrogatepass")


def decode_part(part: str) -> str:
    """Inverse of `encode_part`. Raises UsageError: nothing encodes to that."""
    try:
        decoded = unquote(part, errors="surrogatepass")
    except UnicodeDecodeError:
        decoded = ""
    if not _PART.match(part) or encode_part(decoded) != part:
        raise UsageError(
            f"{part!r} is no part of a trajectory's id: other characters than letters, digits and _.-~ as %XX"
        )
    return decoded


def parse_id(text: str) -> TrajectoryId:
    """The id of a trajectory (four parts) or of a group (three). Raises UsageError: it is none."""
    parts = text.split("/")
    if len(parts) not in (3, 4) or not all(map(_NUMBER.match, parts[2:])):
        raise UsageError(
            f"{text[:200]!r} is no id of a trajectory: REGION/PRODUCER/SEQ/SAMPLE, or REGION/PRODUCER/SEQ of a group"
        )
    region, producer = map(decode_part, parts[:2])
    return TrajectoryId(region, producer, *map(int, parts[2:]))
