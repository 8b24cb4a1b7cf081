"""A picture of how dropped groups differ from trained ones: length, reward and age by fate, one colour a region.

Invariant: any tallies plot, empty ones too; the error bars are two standard errors. Held by tests/unit/deploy/test_drops_plot.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from anabranch.consumers.drops import CONSUMED_FATE, Mean, Tally, everywhere
from anabranch.deploy.plots import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY
from anabranch.schemas.errors import UsageError

_PANELS: dict[str, Callable[[Tally], Mean]] = {
    "tokens a rollout": lambda one: one.length,
    "reward": lambda one: one.reward,
    "age (versions)": lambda one: one.age,
}
FORMATS = (".svg", ".png", ".pdf")


def check_name(path: Path) -> None:
    """Raises UsageError: not a kind of picture that can be written."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--plot {path}: name it {', '.join(f'NAME{suffix}' for suffix in FORMATS)}")


def write_drops_plot(tallies: Mapping[str, Mapping[str, Tally]], path: Path, *, title: str) -> None:
    """SVG, PNG or PDF, by the name of `path`. Raises OSError."""
    fates = sorted(everywhere(tallies), key=lambda fate: (fate != CONSUMED_FATE, fate))
    figure = Figure(figsize=(10, 1.6 + 0.5 * max(1, len(fates))), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(_PANELS), sharey=True, squeeze=False)[0]
    for axes, (label, of) in zip(panels, _PANELS.items(), strict=True):
        _panel(axes, tallies, fates, of)
        axes.set_xlabel(label)
        axes.grid(axis="x", alpha=0.25)
    total = everywhere(tallies)
    names = [f"{'trained' if f == CONSUMED_FATE else f.removeprefix('dropped:')} ({total[f].groups:,})" for f in fates]
    panels[0].set_yticks(range(len(fates)), names)
    panels[0].set_ylim(max(1, len(fates)) - 0.5, -0.5)
    if tallies:
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=9, fontsize=7, frameon=False
        )
    figure.suptitle(f"{title}: groups by fate (± 2 standard errors)", fontsize=9, color=GREY)
    figure.savefig(path)


def _panel(
    axes: Any, tallies: Mapping[str, Mapping[str, Tally]], fates: list[str], of: Callable[[Tally], Mean]
) -> None:
    colors = itertools.cycle([BLUE, ORANGE, GREEN, PINK, SKY, RED])
    for number, (region, color) in enumerate(zip(sorted(tallies), colors, strict=False)):
        shift = 0.3 * (number - (len(tallies) - 1) / 2) / max(1, len(tallies) - 1)
        rows = [(y, of(tallies[region][fate])) for y, fate in enumerate(fates) if fate in tallies[region]]
        errors = [0.0 if math.isnan(mean.error) else 2 * mean.error for _, mean in rows]
        axes.errorbar(
            [mean.mean for _, mean in rows], [y + shift for y, _ in rows], xerr=errors, fmt="o", markersize=4, capsize=3,
            color=color, label=region,
        )  # fmt: skip
    if not tallies:
        axes.text(0.5, 0.5, "no group has ended", transform=axes.transAxes, ha="center", color=GREY)
