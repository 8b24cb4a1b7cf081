"""The plots of a lag study: reward against step for every correction and lag, and what each keeps of it.

Invariant: any summary draws, one of a single cell too; the bytes are a function of it. Held by
tests/unit/deploy/test_lag_report.py.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from anabranch.deploy.lag_summary import Summary
from anabranch.deploy.plots import GREY

_COLUMNS = 4


def _figure(width: float, height: float) -> Figure:
    matplotlib.rcParams["svg.hashsalt"] = "anabranch"
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def draw_curves(path: Path, summary: Summary) -> None:
    """A panel per correction, a line per lag: held-out reward against step, mean over seeds, with the range of the seeds."""
    names = summary.corrections
    rows = math.ceil(len(names) / _COLUMNS)
    figure = _figure(2.6 * min(_COLUMNS, len(names)) + 1.2, 2.1 * rows + 0.8)
    panels = figure.subplots(rows, min(_COLUMNS, len(names)), sharex=True, sharey=True, squeeze=False)
    shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.92, max(2, len(summary.lags))))
    lines: dict[int, Any] = {}
    for axes, name in zip(panels.flat, names, strict=False):
        for lag, shade in zip(summary.lags, shades, strict=False):
            if (entry := summary.entries.get((name, lag))) is None:
                continue
            versions, mean, least, most = zip(*entry.curve, strict=True)
            (lines[lag],) = axes.plot(versions, mean, color=shade, linewidth=1.3)
            axes.fill_between(versions, least, most, color=shade, alpha=0.15, linewidth=0)
        axes.set_title(name, fontsize=8)
        axes.set_ylim(0, 1)
        axes.tick_params(labelsize=7)
    for axes in list(panels.flat)[len(names) :]:
        axes.set_visible(False)
    figure.legend(
        [lines[lag] for lag in sorted(lines)],
        [f"lag {lag}" for lag in sorted(lines)],
        loc="outside right center",
        fontsize=8,
    )
    figure.supxlabel("step", fontsize=8)
    figure.supylabel("held-out reward", fontsize=8)
    figure.suptitle(f"lr {summary.lr:g}: mean of the seeds, range shaded", fontsize=9, color=GREY)
    figure.savefig(path, metadata={"Date": None})


def draw_table(path: Path, summary: Summary) -> None:
    """A row per correction, a column per lag: late held-out reward, as colour and number."""
    names, lags = summary.corrections, summary.lags
    values = np.full((len(names), len(lags)), np.nan)
    for row, name in enumerate(names):
        for column, lag in enumerate(lags):
            if (entry := summary.entries.get((name, lag))) is not None:
                values[row, column] = entry.late
    figure = _figure(0.75 * len(lags) + 3.2, 0.3 * len(names) + 1.2)
    axes = figure.subplots()
    axes.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        if not math.isnan(value):
            axes.text(
                column,
                row,
                f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=8,
                color="black" if value > 0.55 else "white",
            )
    axes.set_xticks(range(len(lags)), [str(lag) for lag in lags], fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel("lag", fontsize=8)
    axes.set_title(f"lr {summary.lr:g}: held-out reward, last quarter of the run", fontsize=9, color=GREY)
    figure.savefig(path, metadata={"Date": None})
