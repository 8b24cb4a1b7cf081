"""The table of trajectories: from a page's address to a filter, and back to addresses of its neighbours. Pure but for the query.

Invariant: an address says all that a page shows, so it can be sent to somebody; what it says wrongly is an error that names the field. Held by
tests/unit/consumers/test_viewer_table.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.trajectory_filter import Range, TrajectoryFilter, Versions, check_fate
from anabranch.consumers.trajectory_page import page
from anabranch.schemas.errors import UsageError

ROWS, MOST_ROWS = 50, 200
NEWEST = "appended_ms:desc"
MOST_TEXT = 200
# field of the form -> (label, what to type)
FIELDS = {
    "step": ("step", "5 or 5..9"), "version": ("version", "e1.v40"), "age": ("age", "2.."), "reward": ("reward", "..0.5"),
    "tokens": ("tokens", "100.."), "group": ("group index", "17"), "region": ("region", ""), "producer": ("producer", ""),
    "fate": ("fate", "trained, age, pending"), "text": ("text", "in prompt or completion"),
}  # fmt: skip
_RANGES = {
    "step": "a step",
    "age": "an age",
    "reward": "a reward",
    "tokens": "a number of tokens",
    "group": "a group index",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """`given`: the fields of the form as they were typed, without empty ones."""

    given: dict[str, str] = field(default_factory=dict)
    sort: str = NEWEST
    number: int = 1
    rows: int = ROWS

    def address(self, **changes: Any) -> str:
        """Of this page with other values; the first page unless `number` is given."""
        values: dict[str, Any] = {"sort": self.sort, "number": 1, "rows": self.rows} | changes
        query = dict(self.given)
        if values["sort"] != NEWEST:
            query["sort"] = values["sort"]
        if values["number"] != 1:
            query["page"] = str(values["number"])
        if values["rows"] != ROWS:
            query["rows"] = str(values["rows"])
        return "/trajectories" + (f"?{urlencode(query)}" if query else "")

    def sorted_by(self, column: str) -> str:
        """Address of this table sorted by `column`: the highest first, then the lowest."""
        return self.address(sort=column if self.sort == f"{column}:desc" else f"{column}:desc")


def parse(query: Mapping[str, str]) -> Asked:
    """Raises UsageError."""
    given = {name: query[name].strip() for name in FIELDS if query.get(name, "").strip()}
    for name, value in given.items():
        if len(value) > MOST_TEXT:
            raise UsageError(f"{FIELDS[name][0]}: at most {MOST_TEXT} characters")
    asked = Asked(
        given, query.get("sort") or NEWEST, _whole(query, "page", 10**9), _whole(query, "rows", MOST_ROWS, ROWS)
    )
    filter_of(asked)
    return asked


def filter_of(asked: Asked) -> TrajectoryFilter:
    """Raises UsageError."""
    given = asked.given
    ranges = {name: Range.parse(given[name], what=what) for name, what in _RANGES.items() if name in given}
    return TrajectoryFilter(
        **ranges,
        version=Versions.parse(given["version"]) if "version" in given else None,
        region=given.get("region"),
        producer=given.get("producer"),
        fate=check_fate(given["fate"]) if "fate" in given else None,
        text=given.get("text"),
    )


def read(reader: RunReader, asked: Asked) -> tuple[list[dict[str, Any]], int]:
    """Rows of the page, and how many fit. Raises UsageError."""
    return page(reader, filter_of(asked), sort=asked.sort, limit=asked.rows, number=asked.number)


def columns() -> list[tuple[str, str]]:
    """(heading, column to sort by or '')."""
    return [
        ("id", ""), ("fate", ""), ("step", "step"), ("age", "age"), ("sampled by", "version_max"), ("reward", "reward"),
        ("advantage", "advantage"), ("max ratio", "ratio_max"), ("tokens", "tokens"), ("appended", "appended_ms"), ("text", ""),
    ]  # fmt: skip


def _whole(query: Mapping[str, str], name: str, most: int, default: int = 1) -> int:
    text = query.get(name) or str(default)
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= most:
        raise UsageError(f"{name}: {text[:20]!r} is not a number from 1 to {most}")
    return int(text)
