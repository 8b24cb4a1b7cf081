"""The report of a lag study: tables and plots made from its results file alone.

Invariant: what stands outside the two marks of the page is left as it is, so words written by hand survive a new run; between
them every word is made from the results. Held by tests/unit/deploy/test_lag_report.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anabranch.deploy.lag_plot import draw_curves, draw_table
from anabranch.deploy.lag_study import read_rows
from anabranch.deploy.lag_summary import BASELINE, KEPT, MARGIN, Entry, Summary, late_reward, summarise
from anabranch.deploy.summary import machine_facts
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import ConfigError
from anabranch.transport.files import write_atomically

BEGIN, END = "<!-- measured: by `anabranch bench lag` -->", "<!-- /measured -->"
PAGE, FIGURES = "README.md", "lag.json"
TARGET_LAG = 8


def write_report(results: Path, folder: Path) -> list[Path]:
    """README.md, lag.json and two plots per learning rate in `folder` (made if missing); returns their paths.

    Raises:
        ConfigError: `results` has no cells or cannot be read; README.md is there without the marks.
    """
    rows = read_rows(results)
    if not rows:
        raise ConfigError(f"{results} has no results yet")
    summaries = summarise(rows)
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / PAGE
    text = _replaced(page, "\n".join(chapter(summary) for summary in summaries))
    paths = [page, folder / FIGURES]
    for summary in summaries:
        for draw, name in ((draw_curves, "reward"), (draw_table, "kept")):
            paths.append(folder / f"{name}-{_tag(summary)}.svg")
            draw(paths[-1], summary)
    write_atomically(folder / FIGURES, (json.dumps(as_json(rows, summaries)) + "\n").encode())
    write_atomically(page, text.encode())
    return paths


def as_json(rows: Sequence[dict[str, Any]], summaries: Sequence[Summary]) -> dict[str, Any]:
    """What tables and plots are made of, and every cell's late and held-out rewards."""
    return {
        "machine": machine_facts(),
        "summaries": [
            {"lr": s.lr, "steps": s.steps, "entries": [
                {**asdict(e), "late": e.late, "kept": s.kept(e.correction, e.lag), "against_none": s.against(e.correction, e.lag)}
                for e in s.entries.values()
            ]} for s in summaries
        ],
        "cells": [
            {key: row[key] for key in ("correction", "lag", "lr", "seed", "steps", "greedy", "stopped", "heldout")}
            | {"late": late_reward(row)} for row in rows
        ],
    }  # fmt: skip


def _replaced(page: Path, measured: str) -> str:
    block = f"{BEGIN}\n\n{measured}\n{END}"
    try:
        text = page.read_text(encoding="utf-8")
    except FileNotFoundError:
        return f"# The lag study\n\n    anabranch bench lag\n\n{block}\n"
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ConfigError(
            f"{page} must have the line {BEGIN!r} and after it {END!r}, once each: the figures go between them"
        )
    return re.sub(re.escape(BEGIN) + ".*" + re.escape(END), lambda _: block, text, flags=re.DOTALL)


def _tag(summary: Summary) -> str:
    return f"lr-{summary.lr:g}" + f"-steps-{summary.steps}"


def chapter(summary: Summary) -> str:
    """Verdicts, plots and tables of one learning rate, as Markdown."""
    seeds = sorted({entry.seeds for entry in summary.entries.values()})
    many = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    tag, lags = _tag(summary), summary.lags
    parts = [
        f"## lr {summary.lr:g}, {summary.steps} steps, {many} seed{'s' * (seeds[-1] > 1)}\n",
        *(f"- {line}" for line in _verdicts(summary)), "",
        f"![reward against step](reward-{tag}.svg)\n", f"![reward by correction and lag](kept-{tag}.svg)\n",
        "Held-out reward, mean of the last quarter of the run (as a share of that at lag 0); † n: runs that collapsed:\n",
        _table(summary, lags, lambda e: _late(summary, e)),
        "Held-out reward, mean over the whole run: who learns faster has more:\n",
        _table(summary, lags, lambda e: f"{e.whole:.3f}"),
        "Reward of the last 10 batches (of policies as old as the lag says) / greedy answers right at the end:\n",
        _table(summary, lags, lambda e: f"{e.train:.2f} / {_number(e.greedy, '{:.2f}')}"),
        "Token ESS, mean over steps (least) / share of tokens masked / steps that a gate would have named:\n",
        _table(summary, [lag for lag in lags if lag], lambda e: (
            f"{_number(e.ess, '{:.2f}')} ({_number(e.ess_least, '{:.2f}')}) / {_number(e.masked, '{:.1%}')} / {e.alarmed:.0%}"
        )),
    ]  # fmt: skip
    return "\n".join(parts)


def _late(summary: Summary, entry: Entry) -> str:
    kept = summary.kept(entry.correction, entry.lag) if entry.lag else None
    share = "" if kept is None else f" ({kept:.2f})"
    return f"{entry.late:.3f}{share}" + (f" †{entry.collapsed}" if entry.collapsed else "")


def _table(summary: Summary, lags: Sequence[int], show: Callable[[Entry], str]) -> str:
    lines = ["| correction | " + " | ".join(f"lag {lag}" for lag in lags) + " |", "|---" * (len(lags) + 1) + "|"]
    for name in summary.corrections:
        found = [summary.entries.get((name, lag)) for lag in lags]
        lines.append(f"| `{name}` | " + " | ".join("–" if e is None else show(e) for e in found) + " |")
    return "\n".join(lines) + "\n"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _verdicts(summary: Summary) -> list[str]:
    """What the tables say: the target, then per lag who keeps the reward and who differs from no correction."""
    lines = []
    default = RunConfig().correction.objective
    found = [(name, summary.kept(name, TARGET_LAG)) for name in (default, BASELINE)]
    if found[0][1] is not None:
        met = "met" if found[0][1] >= KEPT else "**missed**"
        lines.append(
            f"Lag {TARGET_LAG} against lag 0: the default (`{default}`) keeps {found[0][1]:.3f} of the reward (aim ≥ {KEPT}: {met})"
            + ("" if found[1][1] is None else f"; without correction (`{BASELINE}`) {found[1][1]:.3f} is kept.")
        )
    for lag in (lag for lag in summary.lags if lag):
        here = [name for name in summary.corrections if (name, lag) in summary.entries]
        kept = [name for name in here if (summary.kept(name, lag) or 0.0) >= KEPT]
        words = [f"{len(kept)} of {len(here)} keep ≥ {KEPT} of their reward at lag 0" + _names(kept, len(here))]
        for verdict in ("better", "worse"):
            names = [name for name in here if summary.against(name, lag) == verdict]
            if (BASELINE, lag) in summary.entries:
                words.append(f"{verdict} than `{BASELINE}`: {', '.join(f'`{n}`' for n in names) or 'none of them'}")
        lines.append(f"Lag {lag}: " + "; ".join(words) + ".")
    if any(summary.lags):
        lines.append(f"Better or worse: every seed says so, and the mean difference is above {MARGIN}.")
    return lines


def _names(names: Sequence[str], of: int) -> str:
    return "" if len(names) in (0, of) else " (" + ", ".join(f"`{name}`" for name in names) + ")"
