"""PNG plots of a recorded run, from `metrics.jsonl` alone.

Invariant: any history plots, an empty one and one of a single step too; colours are Okabe and Ito's (2008), told apart
by colour-blind readers, and every line has a label. Held by tests/unit/deploy/test_plots.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from anabranch.deploy.history import History
from anabranch.schemas.metrics import DriftRecord, StepRecord

BLUE, ORANGE, GREEN, PINK, SKY, RED, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#767676",
)  # fmt: skip
_AGE_CLASSES = 8
_SMOOTH_STEPS = 10


def write_plots(history: History, folder: Path, *, title: str) -> list[Path]:
    """One PNG per question into `folder` (made if missing); returns their paths.

    reward.png, age.png, bytes.png, ess.png, drift.png, time.png.
    """
    folder.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Callable[[History, Figure], None]] = {
        "reward": _reward,
        "age": _age,
        "bytes": _bytes,
        "ess": _ess,
        "drift": _drift,
        "time": _time,
    }
    paths = []
    for name, make in makers.items():
        figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        make(history, figure)
        figure.suptitle(title, fontsize=9, color=GREY)
        path = folder / f"{name}.png"
        figure.savefig(path)
        paths.append(path)
    return paths


def smooth(values: Sequence[float], window: int = _SMOOTH_STEPS) -> NDArray[np.float64]:
    """[N] → [N]: mean of the last `window` values at each place, fewer at the start."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])
    ends = np.arange(1, len(sums))
    starts = np.maximum(0, ends - window)
    means: NDArray[np.float64] = (sums[ends] - sums[starts]) / (ends - starts)
    return means


def _reward(history: History, figure: Figure) -> None:
    (axes,) = _panels(figure, history, "mean reward")
    steps, rewards = _series(history, lambda s: s.reward_mean)
    axes.plot(steps, rewards, color=SKY, linewidth=0.8, alpha=0.7, label="batch")
    axes.plot(steps, smooth(rewards), color=BLUE, linewidth=2, label=f"batch, mean of {_SMOOTH_STEPS} steps")
    axes.errorbar(
        [e.version for e in history.evaluations],
        [e.mean_reward for e in history.evaluations],
        yerr=[2 * e.standard_error for e in history.evaluations],
        fmt="o", color=RED, capsize=4, zorder=3, label="held-out (± 2 standard errors)",
    )  # fmt: skip
    for e in history.evaluations:
        last = e.version > 0
        axes.annotate(
            f"{e.mean_reward:.3f}", (e.version, e.mean_reward), xytext=(-8 if last else 8, 6),
            textcoords="offset points", ha="right" if last else "left", color=RED, fontweight="bold",
        )  # fmt: skip
    axes.set_ylim(-0.02, 1.02)
    _legend(axes)


def _age(history: History, figure: Figure) -> None:
    axes, lower = _panels(figure, history, f"tokens, mean of {_SMOOTH_STEPS} steps", "versions")
    records = list(history.steps.values())
    counts = np.zeros((_AGE_CLASSES + 1, len(records)))
    for column, record in enumerate(records):
        for age, tokens in record.age_tokens.items():
            counts[min(age, _AGE_CLASSES), column] += tokens
    shares = np.stack([smooth(row) for row in counts / np.maximum(counts.sum(axis=0), 1)])
    used = int(np.max(np.nonzero(shares.sum(axis=1))[0], initial=0)) + 1
    names = [f"age {age}" if age < _AGE_CLASSES else f"{_AGE_CLASSES} or more" for age in range(used)]
    shades = matplotlib.colormaps["cividis"](np.linspace(0, 1, max(used, 2)))
    axes.stackplot([r.step for r in records], shares[:used], labels=names, colors=shades)
    axes.set_ylim(0, 1)
    lower.plot(*_series(history, _mean_age), color=BLUE, label="mean age of the batch's tokens")
    lower.plot(
        *_series(history, lambda s: s.in_queue_age_mean), color=ORANGE, linewidth=1, label="of that in the queue"
    )
    lower.set_ylim(bottom=0)
    _legend(axes)
    _legend(lower)


def _bytes(history: History, figure: Figure) -> None:
    axes, lower = _panels(figure, history, "bytes per update", "% of elements")
    axes.plot(*_series(history, lambda s: max(s.full_bytes, 1)), color=GREY, linestyle="--", label="full weights")
    axes.plot(*_series(history, lambda s: max(s.delta_bytes, 1)), color=BLUE, label="delta, as sent")
    axes.set_yscale("log")
    lower.plot(*_series(history, lambda s: 100 * s.changed_fraction), color=ORANGE, label="changed by the update")
    lower.set_ylim(bottom=0)
    _legend(axes)
    _legend(lower)


def _ess(history: History, figure: Figure) -> None:
    axes, lower = _panels(figure, history, "share", "ratio")
    axes.plot(*_series(history, lambda s: s.ess_token), color=BLUE, label="effective sample size of the token ratios")
    axes.plot(*_series(history, _ess_sequence), color=SKY, linewidth=1, label="of the trajectories'")
    axes.plot(*_series(history, lambda s: s.masked_fraction), color=PINK, label="tokens masked")
    axes.axhline(0.3, color=RED, linestyle=":", label="0.3, default of their gates")
    axes.set_ylim(0, 1.05)
    lower.plot(*_series(history, lambda s: max(s.ratio_max, 1e-6)), color=ORANGE, linewidth=1, label="largest ratio")
    lower.plot(*_series(history, lambda s: max(s.ratio_mean, 1e-6)), color=BLUE, label="mean ratio")
    lower.set_yscale("log")
    _legend(axes)
    _legend(lower)


def _ess_sequence(step: StepRecord) -> float:
    return float("nan") if step.ess_sequence is None else step.ess_sequence


def _drift(history: History, figure: Figure) -> None:
    axes, lower = _panels(figure, history, "KL (k3)", "tokens masked")
    starts = sorted({cell.age_from for step in history.steps.values() for cell in step.drift})
    shades = matplotlib.colormaps["cividis"](np.linspace(0, 0.9, max(len(starts), 2)))
    for start, shade, until in zip(starts, shades, [*starts[1:], None], strict=False):
        ages = f"{start}" if until == start + 1 else f"{start} or more" if until is None else f"{start} to {until - 1}"
        values = [_over(step, lambda c: c.kl_k3, lambda c, a=start: c.age_from == a) for step in history.steps.values()]
        # Dots, because an age that one step alone has is no line.
        axes.plot(list(history.steps), np.maximum(values, 1e-9), ".-", color=shade, linewidth=1, label=f"age {ages}")
    axes.set_yscale("log")
    for sign, color, line in (("positive", GREEN, "-"), ("negative", RED, "--")):
        values = [
            _over(step, lambda c: c.masked_fraction, lambda c, s=sign: c.advantage == s)
            for step in history.steps.values()
        ]
        lower.plot(list(history.steps), values, line, color=color, linewidth=1, label=f"{sign} advantage")
    lower.set_ylim(bottom=0)
    if starts:
        _legend(axes)
    _legend(lower)


def _over(step: StepRecord, of: Callable[[DriftRecord], float], chosen: Callable[[DriftRecord], bool]) -> float:
    """Mean of a figure over the tokens of the chosen cells; NaN, which plots as a gap, without any."""
    cells = [cell for cell in step.drift if chosen(cell)]
    tokens = sum(cell.tokens for cell in cells)
    return sum(of(cell) * cell.tokens for cell in cells) / tokens if tokens else float("nan")


def _time(history: History, figure: Figure) -> None:
    upper, lower = _panels(figure, history, "seconds per step", "tokens/s sampled")
    parts = {"train": "step_s", "publish": "publish_s", "checkpoint": "checkpoint_s", "wait for batch": "wait_s"}
    series = [[float(getattr(step, name)) for step in history.steps.values()] for name in parts.values()]
    upper.stackplot(list(history.steps), series, labels=list(parts), colors=[BLUE, GREEN, PINK, ORANGE])
    regions = sorted({region for s in history.steps.values() for region in s.tokens_per_s})
    for region, color in zip(regions, itertools.cycle([BLUE, RED, GREEN, PINK, ORANGE, SKY, GREY]), strict=False):
        speeds = [step.tokens_per_s.get(region, 0.0) for step in history.steps.values()]
        lower.plot(list(history.steps), speeds, color=color, label=region)
    lower.set_ylim(bottom=0)
    _legend(upper)
    if regions:
        _legend(lower)


def _mean_age(step: StepRecord) -> float:
    total = sum(step.age_tokens.values())
    return sum(age * n for age, n in step.age_tokens.items()) / total if total else 0.0


def _panels(figure: Figure, history: History, *labels: str) -> list[Any]:
    """One panel per y label, over a common step axis."""
    panels = list(figure.subplots(len(labels), 1, sharex=True, squeeze=False)[:, 0])
    for axes, label in zip(panels, labels, strict=True):
        axes.set_ylabel(label)
        axes.grid(alpha=0.25)
        if not history.steps:
            axes.text(0.5, 0.5, "no step recorded", transform=axes.transAxes, ha="center", color=GREY)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return panels


def _legend(axes: Any) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=9, fontsize=7, frameon=False, borderaxespad=0.2,
                columnspacing=1.0, handlelength=1.2)  # fmt: skip


def _series(history: History, of: Callable[[StepRecord], float]) -> tuple[list[int], list[float]]:
    return list(history.steps), [of(step) for step in history.steps.values()]
