"""What turns of training steps come to: medians, ratios within a round, and whether all computed the same.

Invariant: ratios are medians of the rounds' ratios, so that a busy moment of the machine meets both sides; a first turn warms up
and is in no figure but the comparison of gradients. Held by tests/unit/learner/test_bench_step.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Of the gradient's norm, and of the loss: in float32 a hundred times what sums in another order come to, in bf16 what rounding does.
_MOST_APART = {True: (1e-4, 1e-5), False: (0.1, 1e-2)}


@dataclass(frozen=True)
class Turn:
    """One step of one way."""

    seconds: float
    cpu_seconds: float
    base_mb: float  # resident before
    peak_mb: float
    loss: float
    backward_seconds: float
    optimizer_seconds: float

    @property
    def extra_mb(self) -> float:
        """What the step took beyond weights, moments and program."""
        return self.peak_mb - self.base_mb


def summarise(
    turns: Mapping[str, list[Turn]],
    facts: Mapping[str, Mapping[str, Any]],
    gradients: Mapping[str, Path],
    *,
    completion_tokens: int,
    exact: bool = True,
) -> dict[str, Any]:
    """Figures by way, compared with each way of TRL, and what is wrong (`apart`): ways whose loss or gradient is another's.

    Args:
        turns: by way, equally many; the first of each warms up.
        facts: what each way said of its plan.
        gradients: a file of each way's first gradient: float32, parameters in one order.
        exact: whether all compute in float32.
    """
    names = list(turns)
    most_gradient, most_loss = _MOST_APART[exact]
    figures: dict[str, Any] = {"completion_tokens": completion_tokens, "ways": {}, "ratios": {}, "apart": []}
    for name in names:
        timed = turns[name][1:]
        seconds = _median(timed, lambda turn: turn.seconds)
        figures["ways"][name] = dict(facts[name]) | {
            "seconds": round(seconds, 3),
            "tokens_per_s": round(completion_tokens / seconds, 2),
            "cpu_seconds": round(_median(timed, lambda turn: turn.cpu_seconds), 3),
            "backward_share": round(_median(timed, lambda turn: turn.backward_seconds / turn.seconds), 3),
            "optimizer_share": round(_median(timed, lambda turn: turn.optimizer_seconds / turn.seconds), 3),
            "base_mb": round(_median(timed, lambda turn: turn.base_mb), 1),
            "peak_mb": round(max(turn.peak_mb for turn in timed), 1),
            "extra_mb": round(max(turn.extra_mb for turn in timed), 1),
            "loss": turns[name][0].loss,
            "seconds_by_round": [round(turn.seconds, 2) for turn in timed],
        }  # fmt: skip
    for other in (name for name in names if name.startswith("trl")):
        for name in names:
            if name != other:
                figures["ratios"][f"{name} over {other}"] = _ratios(turns[name][1:], turns[other][1:])
    figures["gradient_apart"] = {}
    for name in names[1:]:
        distance = apart(gradients[name], gradients[names[0]])
        figures["gradient_apart"][f"{name} from {names[0]}"] = float(f"{distance:.3g}")
        if not distance <= most_gradient:
            figures["apart"].append(f"gradient of {name} is {distance:.3g} of the norm from that of {names[0]}")
        if not abs(turns[name][0].loss - turns[names[0]][0].loss) <= most_loss:
            figures["apart"].append(
                f"loss {turns[name][0].loss:.8g} of {name}, {turns[names[0]][0].loss:.8g} of {names[0]}"
            )
    return figures


def _median(turns: list[Turn], of: Callable[[Turn], float]) -> float:
    return statistics.median(of(turn) for turn in turns)


def _ratios(ours: list[Turn], theirs: list[Turn]) -> dict[str, Any]:
    """Speeds: larger is faster; memory: smaller is less."""
    by_round = [b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True)]
    by_cpu = [b.cpu_seconds / a.cpu_seconds for a, b in zip(ours, theirs, strict=True)]
    most = {
        key: [max(getattr(turn, key) for turn in side) for side in (ours, theirs)] for key in ("peak_mb", "extra_mb")
    }
    return {
        "speed": round(statistics.median(by_round), 3), "speed_cpu": round(statistics.median(by_cpu), 3),
        "speed_by_round": [round(ratio, 3) for ratio in by_round],
        "peak_memory": round(most["peak_mb"][0] / most["peak_mb"][1], 3),
        "extra_memory": round(most["extra_mb"][0] / most["extra_mb"][1], 3),
    }  # fmt: skip


def apart(a: Path, b: Path) -> float:
    """|a − b| / |b| of two files of float32, NaN if they are not equally long."""
    one, other = (np.memmap(path, np.float32, "r") for path in (a, b))
    if one.size != other.size:
        return float("nan")
    difference = total = 0.0
    for start in range(0, one.size, 2**20):
        x, y = (values[start : start + 2**20].astype(np.float64) for values in (one, other))
        difference += float(np.square(x - y).sum())
        total += float(np.square(y).sum())
    return float(np.sqrt(difference / total)) if total else float("nan")


def as_table(figures: Mapping[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| way | passes | positions | s/step | tokens/s | CPU s | backward | optimizer | base MB | peak MB | extra MB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, way in figures["ways"].items():
        lines.append(
            f"| {name} | {way['passes']} | {way['positions']:,} | {way['seconds']:.2f} | {way['tokens_per_s']:.1f} "
            f"| {way['cpu_seconds']:.2f} | {way['backward_share']:.0%} | {way['optimizer_share']:.0%} "
            f"| {way['base_mb']:,.0f} | {way['peak_mb']:,.0f} | {way['extra_mb']:,.0f} |"
        )
    lines += ["", "| | speed | by CPU time | peak memory | extra memory |", "|---|---|---|---|---|"]
    for pair, ratio in figures["ratios"].items():
        lines.append(
            f"| {pair} | {ratio['speed']:.2f} | {ratio['speed_cpu']:.2f} | {ratio['peak_memory']:.2f} | {ratio['extra_memory']:.2f} |"
        )
    lines += ["", *(f"gradient, {pair}: {value:.2g}" for pair, value in figures["gradient_apart"].items())]
    return "\n".join(lines)
