"""The figures of a lag study: seeds put together, and what is said about them.

Invariant: a figure is made from the results alone, and a sentence about a difference from seeds that are paired: better or worse is
said only where all seeds agree and the mean difference exceeds `MARGIN`. Held by tests/unit/deploy/test_lag_summary.py.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

MARGIN = 0.02
KEPT = 0.95  # of the reward at lag 0: what counts as having kept it
BASELINE = "none"
_LAST_STEPS = 10

Setting = tuple[float, int]  # learning rate, steps


@dataclass(frozen=True, slots=True)
class Entry:
    """One correction at one lag. Figures are means over seeds; those `by_seed` are of each."""

    correction: str
    lag: int
    late_by_seed: Mapping[int, float]  # held-out reward, mean of the versions of the last quarter
    whole: float  # held-out reward, mean over the run: who learns faster has more of it
    train: float  # reward of the last 10 batches: of policies `lag` versions older
    greedy: float | None
    collapsed: int  # runs that ended below where they began, or in a number that is none
    stopped: int  # of them, those that ended early
    ess: float | None  # mean over steps
    ess_least: float | None  # of any step
    masked: float | None  # mean over steps
    kl: float | None  # k3, mean over steps
    alarmed: float  # share of steps that a gate would have named
    curve: Sequence[tuple[int, float, float, float]]  # version, held-out reward: mean, least, most

    @property
    def seeds(self) -> int:
        return len(self.late_by_seed)

    @property
    def late(self) -> float:
        return fmean(self.late_by_seed.values())


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one learning rate and number of steps. `entries` by (correction, lag)."""

    lr: float
    steps: int
    entries: Mapping[tuple[str, int], Entry]

    @property
    def corrections(self) -> list[str]:
        return list(dict.fromkeys(correction for correction, _ in self.entries))

    @property
    def lags(self) -> list[int]:
        return sorted({lag for _, lag in self.entries})

    def kept(self, correction: str, lag: int) -> float | None:
        """The reward as a share of that at lag 0, over the seeds that both have."""
        return self._ratio((correction, lag), (correction, 0))

    def against(self, correction: str, lag: int, other: str = BASELINE) -> str:
        """`better`, `worse` or `alike` than `other` at the same lag; "" if they share no seeds."""
        mine, theirs = self.entries.get((correction, lag)), self.entries.get((other, lag))
        if mine is None or theirs is None:
            return ""
        seeds = mine.late_by_seed.keys() & theirs.late_by_seed.keys()
        differences = [mine.late_by_seed[seed] - theirs.late_by_seed[seed] for seed in seeds]
        if not differences:
            return ""
        if min(differences) > 0 and fmean(differences) > MARGIN:
            return "better"
        return "worse" if max(differences) < 0 and fmean(differences) < -MARGIN else "alike"

    def _ratio(self, above: tuple[str, int], below: tuple[str, int]) -> float | None:
        a, b = self.entries.get(above), self.entries.get(below)
        if a is None or b is None or not (seeds := a.late_by_seed.keys() & b.late_by_seed.keys()):
            return None
        base = fmean(b.late_by_seed[seed] for seed in seeds)
        return fmean(a.late_by_seed[seed] for seed in seeds) / base if base else None


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[Summary]:
    """One summary per learning rate and number of steps, in that order; entries in the order in which they were begun."""
    by: dict[Setting, dict[tuple[str, int], list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by[row["lr"], row["steps"]][row["correction"], row["lag"]].append(row)
    return [
        Summary(lr, steps, {key: _entry(*key, cells) for key, cells in by[lr, steps].items()})
        for lr, steps in sorted(by)
    ]


def late_reward(row: Mapping[str, Any]) -> float:
    """Held-out reward of a cell, mean of the versions measured in its last quarter. A run that ended early has none then: what
    it lost counts as 0."""
    if row["stopped"]:
        return 0.0
    return fmean(reward for version, reward in row["heldout"] if version > 0.75 * row["steps"])


def has_collapsed(row: Mapping[str, Any]) -> bool:
    return bool(row["stopped"]) or late_reward(row) < row["heldout"][0][1]


def _entry(correction: str, lag: int, rows: Sequence[Mapping[str, Any]]) -> Entry:
    def every(name: str) -> list[float]:
        return [value for row in rows for value in row[name] if value is not None]

    def mean(values: Sequence[float]) -> float | None:
        return fmean(values) if values else None

    points: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        for version, reward in row["heldout"]:
            points[version].append(reward)
    steps = sum(len(row["reward"]) for row in rows)
    return Entry(
        correction, lag, {row["seed"]: late_reward(row) for row in rows},
        whole=fmean(_whole(row) for row in rows),
        train=fmean(fmean(row["reward"][-_LAST_STEPS:] or [0.0]) for row in rows),
        greedy=mean([row["greedy"] for row in rows if row["greedy"] is not None]),
        collapsed=sum(map(has_collapsed, rows)), stopped=sum(bool(row["stopped"]) for row in rows),
        ess=mean(every("ess")), ess_least=min(every("ess"), default=None), masked=mean(every("masked")), kl=mean(every("kl")),
        alarmed=sum(max(row["alarms"].values(), default=0) for row in rows) / max(1, steps),
        curve=[(v, fmean(found), min(found), max(found)) for v, found in sorted(points.items())],
    )  # fmt: skip


def _whole(row: Mapping[str, Any]) -> float:
    """The mean of the held-out reward over versions (trapezoids); 0 from where a run ended."""
    points = [*row["heldout"], *([[row["steps"], 0.0]] if row["stopped"] else [])]
    area = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points))
    return float(area / row["steps"])
