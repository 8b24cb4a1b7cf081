"""Steps and pending groups over the time of a chaos run, with a mark for every fault.

Invariant: any run draws, one without a sample too. Held by tests/unit/deploy/chaos/test_report.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from anabranch.deploy.chaos.monitor import Watch
from anabranch.deploy.plots import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY

_REGIONS = (ORANGE, GREEN, PINK, SKY)


def draw(path: Path, watch: Watch, began: float, facts: dict[str, Any]) -> None:
    """An SVG; `began`: the monotonic time at its left edge."""
    matplotlib.rcParams["svg.hashsalt"] = "anabranch"
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasSVG(figure)
    rate, pending = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    minutes = [(when - began) / 60 for when in watch.steps]
    rate.plot(
        minutes, range(1, len(minutes) + 1), color=BLUE, linewidth=1.5, label="steps made, repeated ones included"
    )
    for index, fault in enumerate(
        f for f in (*facts.get("faults", ()), *facts.get("marks", ())) if f["injected_s"] is not None
    ):
        label = "fault" if index == 0 else None
        rate.axvline(fault["injected_s"] / 60, color=RED, linewidth=0.4, alpha=0.5, label=label)
    rate.set_ylabel("steps")
    rate.legend(loc="upper left", fontsize=8)
    at = [sample.at_s / 60 for sample in watch.samples]
    regions = sorted({region for sample in watch.samples for region in sample.pending})
    for region, colour in zip(regions, _REGIONS * (1 + len(regions) // len(_REGIONS)), strict=False):
        values = [sample.pending.get(region) for sample in watch.samples]
        series = [float("nan") if value is None else float(value) for value in values]
        pending.plot(at, series, color=colour, linewidth=1, label=region)
    pending.set_xlabel("minutes")
    pending.set_ylabel("groups pending")
    if regions:
        pending.legend(loc="upper left", fontsize=8)
    figure.suptitle(f"{facts['scenario']}: steps and pending groups", fontsize=9, color=GREY)
    figure.savefig(path, metadata={"Date": None})
