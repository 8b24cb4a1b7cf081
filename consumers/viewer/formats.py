"""Values as the viewer's pages show them. Pure.

Invariant: what is not known is shown as "-". Held by tests/unit/consumers/test_viewer_charts.py.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

UNKNOWN = "-"


def number(value: float | int | None, digits: int = 4) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, float):
        return f"{value:.{digits}g}" if math.isfinite(value) else str(value)
    return f"{value:,}"


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"


def size(value: float | None) -> str:
    """Bytes."""
    if value is None:
        return UNKNOWN
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if float(value) >= factor:
            return f"{float(value) / factor:.3g} {unit}"
    return f"{float(value):.0f} B"


def when(time_ms: int | None) -> str:
    """UTC."""
    if time_ms is None:
        return UNKNOWN
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    except (ValueError, OverflowError, OSError):
        return str(time_ms)


def fate(value: str | None) -> str:
    return "pending" if value is None else value.removeprefix("dropped:")


def versions(row: dict[str, Any]) -> str:
    """`e1.v3`, `e1.v3-5`, or `e1.v3-e2.v5`."""
    low, high = row["version_min"], row["version_max"]
    if low is None:
        return UNKNOWN
    if row["epoch_min"] != row["epoch"]:
        return f"e{row['epoch_min']}.v{low}-e{row['epoch']}.v{high}"
    return f"e{row['epoch']}.v{low}" + ("" if low == high else f"-{high}")


FILTERS = {f.__name__: f for f in (number, percent, size, when, fate, versions)}
