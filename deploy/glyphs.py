"""Numbers and log lines as short text: sparklines, bars, durations, sizes. Pure; plain ASCII on request.

Invariant: every function takes any float, infinite and NaN included, and its text is never wider than asked.
Held by tests/unit/deploy/test_display.py.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence

SPARKS, ASCII_SPARKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"


def sparkline(
    values: Sequence[float], width: int, *, low: float = 0.0, high: float = 1.0, ascii_only: bool = False
) -> str:
    """`values` as a line of at most `width` characters, means over equal stretches, clamped to [low, high]."""
    if not values or width < 1:
        return ""
    marks = ASCII_SPARKS if ascii_only else SPARKS
    columns = min(width, len(values))
    means = [
        statistics.fmean(values[i * len(values) // columns : (i + 1) * len(values) // columns]) for i in range(columns)
    ]
    scale = (len(marks) - 1) / ((high - low) or 1.0)
    return "".join(marks[round(min(max(m - low, 0.0), high - low) * scale)] if math.isfinite(m) else "?" for m in means)


def bar(share: float, width: int, *, ascii_only: bool = False) -> str:
    """`share` of `width` filled, the rest shown too, so that the sum is visible without colour."""
    full = round(min(max(share, 0.0), 1.0) * width)
    solid, empty = ("#", ".") if ascii_only else ("█", "░")
    return solid * full + empty * (width - full)


def duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size(count: float) -> str:
    """Bytes in decimal units: `61.2 kB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def log_line(line: str) -> str:
    """A structured log line as a person reads it (`warning: swap refused policy=e1.v3`); any other line as it is."""
    if not line.startswith("{"):
        return line
    try:
        fields = json.loads(line)
    except ValueError:
        return line
    if not isinstance(fields, dict) or "event" not in fields:
        return line
    event, level = fields.pop("event"), fields.pop("level", "info")
    for known in ("service", "region", "timestamp"):
        fields.pop(known, None)
    words = [str(event) if level == "info" else f"{level}: {event}", *(f"{k}={v}" for k, v in fields.items())]
    return " ".join(words)
