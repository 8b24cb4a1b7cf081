"""Values of a recorded run as a terminal may be shown them: numbers, times, ids, and text that somebody's model wrote.

Invariant: nothing that a model or a producer wrote reaches the terminal as other than printable characters (`plain`), and lines are
as wide as they were asked to be. Held by tests/unit/deploy/test_replay_text.py.
"""

from __future__ import annotations

import math
import shutil
import textwrap
import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from anabranch.deploy.plain_text import plain

NARROWEST, WIDEST = 60, 200
UNKNOWN = "-"


def terminal_width() -> int:
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size((120, 24)).columns))


def when(time_ms: int | None) -> str:
    """ "2026-01-02 03:04:05.678", UTC."""
    if time_ms is None:
        return UNKNOWN
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    except (ValueError, OverflowError, OSError):
        return str(time_ms)


def number(value: float | int | None, digits: int = 4) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, float):
        return f"{value:.{digits}g}" if math.isfinite(value) else str(value)
    return f"{value:,}"


def fate(value: str | None) -> str:
    return "pending" if value is None else plain(value.removeprefix("dropped:"), 20)


def versions(row: dict[str, Any]) -> str:
    """`e1.v3`, `e1.v3-5`, or `e1.v3-e2.v5`."""
    low, high = row["version_min"], row["version_max"]
    if low is None:
        return UNKNOWN
    if row["epoch_min"] != row["epoch"]:
        return f"e{row['epoch_min']}.v{low}-e{row['epoch']}.v{high}"
    return f"e{row['epoch']}.v{low}" + ("" if low == high else f"-{high}")


def block(text: str, width: int, *, most: int | None = None) -> list[str]:
    """`text` line by line, each wrapped to `width` columns; what is not printable is escaped, its line breaks kept."""
    lines: list[str] = []
    for line in text.split("\n"):
        shown = plain(line)
        lines += textwrap.wrap(
            shown, width, drop_whitespace=False, replace_whitespace=False, break_on_hyphens=False
        ) or [""]
    if most is not None and len(lines) > most:
        lines = [*lines[:most], f"... {len(lines) - most} more lines"]
    return lines


def fit(text: str, width: int) -> str:
    """`text`, printable, in exactly `width` columns; characters of two columns count as such."""
    shown, used = [], 0
    for character in text:
        size = columns_of(character)
        if used + size > width:
            while used > width - 1 and shown:
                used -= columns_of(shown.pop())
            return "".join(shown) + "…" + " " * (width - used - 1)
        shown.append(character)
        used += size
    return "".join(shown) + " " * (width - used)


def columns_of(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def width_of(text: str) -> int:
    return sum(map(columns_of, text))


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> list[str]:
    """Lines of a table; columns are right-aligned but for those of `left`."""
    widths = [max(map(width_of, column)) for column in zip(headings, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell + " " * (w - width_of(cell)) if i in left else " " * (w - width_of(cell)) + cell
            for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return [line(headings), *map(line, rows)]


def json_value(value: Any) -> Any:
    """As JSON has it: NaN and infinities as strings, which it has no numbers for."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(inner) for inner in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return str(value)
