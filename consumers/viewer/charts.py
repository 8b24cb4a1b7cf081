"""Charts as SVG, drawn on the server. Pure.

Invariant: a chart has no colour of its own: series are told apart by class (the style sheet's, light or dark, safe for the colour-blind) and by dash;
numbers that are none leave a gap. What it draws can be read as text: title, axes, legend, and the last value of each series. Held by
tests/unit/consumers/test_viewer_charts.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 8, 8, 26
MOST_POINTS = 400
SERIES = 8  # classes that the style sheet knows


@dataclass(frozen=True, slots=True)
class Series:
    """`points`: (x, y), ascending by x; y may be None."""

    name: str
    points: Sequence[tuple[float, float | None]]


@dataclass(frozen=True, slots=True)
class Chart:
    """`steps`: values hold until the next point (versions served, for example)."""

    title: str
    series: Sequence[Series]
    x: str = "step"
    unit: str = ""
    from_zero: bool = False
    steps: bool = False


def thinned(points: Sequence[tuple[float, float | None]], most: int = MOST_POINTS) -> list[tuple[float, float | None]]:
    """At most about `most` points: of each stretch its lowest and highest, so that no peak is lost."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    found: list[tuple[float, float | None]] = []
    for at in range(0, len(points), size):
        part = [p for p in points[at : at + size] if _finite(p[1])]
        if part:
            low, high = min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])  # type: ignore[arg-type, return-value]
            found += sorted({low, high})
    return found


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers from `low` to `high`."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float | None) -> str:
    """A number as an axis has it: 1.5k, 0.25, 3M."""
    if value is None or not math.isfinite(value):
        return "-"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def svg(chart: Chart) -> Markup:
    """The chart as an element of a page."""
    drawn = [Series(s.name, thinned(s.points)) for s in chart.series]
    values = [(x, y) for s in drawn for x, y in s.points if y is not None and math.isfinite(y)]
    if not values:
        return Markup(
            '<figure class="chart"><figcaption>{}</figcaption><p class="empty">nothing recorded</p></figure>'
        ).format(chart.title)
    x0, x1 = min(x for x, _ in values), max(x for x, _ in values)
    y0, y1 = min(y for _, y in values), max(y for _, y in values)
    if chart.from_zero:
        y0 = min(0.0, y0)
    if y0 == y1:
        y0, y1 = y0 - (abs(y0) * 0.1 or 0.5), y1 + (abs(y1) * 0.1 or 0.5)
    if x0 == x1:
        x1 = x0 + 1

    def px(x: float) -> float:
        return LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return TOP + (y1 - y) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    parts = [Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(WIDTH, HEIGHT, _words(chart))]
    for y in ticks(y0, y1):
        parts.append(
            Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
                LEFT, WIDTH - RIGHT, py(y), py(y)
            )
        )
        parts.append(
            Markup('<text class="tick" x="{}" y="{:.1f}" text-anchor="end">{}</text>').format(
                LEFT - 6, py(y) + 4, short(y)
            )
        )
    for x in ticks(x0, x1, 6):
        parts.append(
            Markup('<text class="tick" x="{:.1f}" y="{}" text-anchor="middle">{}</text>').format(
                px(x), HEIGHT - 8, short(x)
            )
        )
    for number, series in enumerate(drawn):
        for line in _lines(series.points, steps=chart.steps):
            path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in line)
            parts.append(Markup('<polyline class="s{}" points="{}"/>').format(number % SERIES, path))
            if len(line) == 1:
                ((x, y),) = line
                parts.append(
                    Markup('<circle class="s{}" cx="{:.1f}" cy="{:.1f}" r="2.5"/>').format(
                        number % SERIES, px(x), py(y)
                    )
                )
    parts.append(Markup("</svg>"))
    return Markup('<figure class="chart"><figcaption>{}{}</figcaption>{}{}</figure>').format(
        chart.title, f" ({chart.unit})" if chart.unit else "", Markup("").join(parts), _legend(drawn)
    )


def _lines(points: Sequence[tuple[float, float | None]], *, steps: bool) -> list[list[tuple[float, float]]]:
    """Stretches without a gap."""
    lines: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if not _finite(y):
            lines.append([])
            continue
        assert y is not None
        if steps and lines[-1]:
            lines[-1].append((x, lines[-1][-1][1]))
        lines[-1].append((x, y))
    return [line for line in lines if line]


def _legend(series: Sequence[Series]) -> Markup:
    items = [
        Markup(
            '<li><svg class="key" viewBox="0 0 20 6"><line class="s{}" x1="0" x2="20" y1="3" y2="3"/></svg> {} <b>{}</b></li>'
        ).format(number % SERIES, one.name, short(next((y for _, y in reversed(one.points) if _finite(y)), None)))
        for number, one in enumerate(series)
    ]
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(items))


def _words(chart: Chart) -> str:
    told = ", ".join(
        f"{s.name} {short(next((y for _, y in reversed(s.points) if _finite(y)), None))}" for s in chart.series
    )
    return f"{chart.title} by {chart.x}; last values: {told}"


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def bars(title: str, values: Sequence[tuple[str, int]]) -> Markup:
    """Named counts as horizontal bars."""
    if not values:
        return Markup('<figure class="chart"><figcaption>{}</figcaption><p class="empty">none</p></figure>').format(
            title
        )
    most = max(count for _, count in values) or 1
    rows = [
        Markup(
            '<tr><th scope="row">{}</th><td><meter min="0" max="{}" value="{}">{}</meter></td><td class="n">{:,}</td></tr>'
        ).format(name, most, count, count, count)
        for name, count in values
    ]
    return Markup('<figure class="chart"><figcaption>{}</figcaption><table class="bars">{}</table></figure>').format(
        escape(title), Markup("").join(rows)
    )
