"""The first page: how the run goes. From a reader's rows to charts.

Invariant: every figure is one that the learner logged or that follows from its log; what no line tells is left out. Held by
tests/unit/consumers/test_viewer_overview.py.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anabranch.consumers.run_reader import RunReader
from anabranch.consumers.viewer.charts import Chart, Series
from anabranch.schemas.errors import TrajectoryError
from anabranch.schemas.versions import PolicyVersion

_STEPS = (
    "SELECT step, epoch, version, time_ms, steps_total, reward_mean, in_flight_age_mean, in_queue_age_mean, ess_token, ess_sequence, "
    "masked_fraction, delta_bytes, changed_fraction, queue_depth, versions_served, dropped, drift, wait_s, step_s, publish_s, checkpoint_s, loss, "
    "grad_norm, kl_k3, tokens, rollouts, tokens_per_s, eta_s, gates FROM steps ORDER BY time_ms"
)
Points = list[tuple[float, float | None]]


@dataclass(frozen=True, slots=True)
class Overview:
    """`facts`: (name, value) of the run as it is now; `drops`: cause -> groups, most first; `alarms`: (step, text), newest first."""

    facts: list[tuple[str, str]]
    charts: list[Chart]
    drops: list[tuple[str, int]]
    alarms: list[tuple[int, str]]
    evaluations: list[dict[str, Any]]


def overview(reader: RunReader) -> Overview:
    steps = reader.rows(_STEPS)
    notes = reader.rows(
        "SELECT time_ms, what, detail FROM notes WHERE what IN ('started', 'resumed', 'stopped', 'finished') ORDER BY time_ms"
    )
    fates = reader.rows(
        "SELECT fate, count(*) AS n FROM fates WHERE fate != 'trained' GROUP BY fate ORDER BY n DESC, fate"
    )
    (trained,) = reader.rows("SELECT count(*) AS n FROM fates WHERE fate = 'trained'")
    evaluations = reader.rows(
        "SELECT epoch, version, prompts, mean_reward, standard_error FROM evaluations ORDER BY time_ms"
    )
    return Overview(
        facts=_facts(steps, notes, trained["n"], sum(row["n"] for row in fates)),
        charts=charts(steps, evaluations),
        drops=[(row["fate"].removeprefix("dropped:"), row["n"]) for row in fates],
        alarms=[(s["step"], text) for s in reversed(steps[-500:]) for text in _list(s["gates"])][:20],
        evaluations=evaluations,
    )


def _facts(
    steps: Sequence[Mapping[str, Any]], notes: Sequence[Mapping[str, Any]], trained: int, dropped: int
) -> list[tuple[str, str]]:
    found = []
    if notes:
        last = notes[-1]["what"]
        found.append(("state", "running" if last in ("started", "resumed") else last))
    if steps:
        last = steps[-1]
        found += [
            ("step", f"{last['step']} of {last['steps_total']}"),
            ("policy", f"e{last['epoch']}.v{last['step']}"),
            ("reward", f"{last['reward_mean']:.3f}"),
        ]
        recent = steps[-20:]
        seconds = (recent[-1]["time_ms"] - recent[0]["time_ms"]) / 1000
        if seconds > 0:
            found.append(("rollouts/s", f"{sum(s['rollouts'] for s in recent[1:]) / seconds:,.0f}"))
        total = sum(s["wait_s"] + s["step_s"] + s["publish_s"] + (s["checkpoint_s"] or 0.0) for s in recent)
        if total > 0:
            found.append(("waits for rollouts", f"{sum(s['wait_s'] for s in recent) / total:.0%} of the time"))
        if last["eta_s"] is not None and last["step"] < last["steps_total"]:
            found.append(("left", f"{last['eta_s'] / 60:.0f} min"))
    found += [("groups trained", f"{trained:,}"), ("groups dropped", f"{dropped:,}")]
    return found


def charts(steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> list[Chart]:
    def line(name: str, key: str) -> Series:
        return Series(name, [(s["step"], s[key]) for s in steps])

    held_out = Series("held-out", [(e["version"], e["mean_reward"]) for e in evaluations])
    return [
        Chart("Reward", [line("batch", "reward_mean"), *([held_out] if evaluations else [])]),
        Chart("Age of a token", [line("gained in flight", "in_flight_age_mean"), line("in the queue", "in_queue_age_mean")], unit="versions", from_zero=True),
        Chart("Effective sample size", [line("tokens", "ess_token"), line("trajectories", "ess_sequence")], from_zero=True),
        Chart("Masked by lag", _by_lag(steps, "masked_fraction"), unit="share of tokens", from_zero=True),
        Chart("Mean ratio by lag", _by_lag(steps, "ratio_mean")),
        Chart("Bytes of an update", [line("delta", "delta_bytes")], unit="bytes", from_zero=True),
        Chart("Changed by an update", [line("elements", "changed_fraction")], unit="share", from_zero=True),
        Chart("Groups held for later", _by_key(steps, "queue_depth"), unit="groups", from_zero=True),
        Chart("Versions served", _served(steps), steps=True),
        Chart("Tokens sampled", _by_key(steps, "tokens_per_s"), unit="per second", from_zero=True),
        Chart("Dropped before a step", _by_key(steps, "dropped"), unit="groups", from_zero=True),
        Chart("Where the time goes", [line("waiting", "wait_s"), line("step", "step_s"), line("publishing", "publish_s"), line("checkpoint", "checkpoint_s")], unit="s", from_zero=True),
        Chart("Gradient norm", [line("before clipping", "grad_norm")], from_zero=True),
        Chart("KL(k3) from the sampling policies", [line("all tokens", "kl_k3")], from_zero=True),
    ]  # fmt: skip


def _by_key(steps: Sequence[Mapping[str, Any]], column: str) -> list[Series]:
    """A table of JSON per step as a series per key; a step that does not name a key has 0 of it."""
    tables = [(s["step"], _object(s[column])) for s in steps]
    names = sorted({name for _, table in tables for name in table})
    return [Series(name, [(step, _number(table.get(name, 0))) for step, table in tables]) for name in names]


def _by_lag(steps: Sequence[Mapping[str, Any]], figure: str) -> list[Series]:
    """Over both signs of the advantage, weighted by tokens."""
    found: dict[int, Points] = defaultdict(list)
    for step in steps:
        cells: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for cell in _list(step["drift"]):
            value = _number(cell.get(figure))
            if value is not None and cell.get("tokens"):
                cells[int(cell["age_from"])].append((value, int(cell["tokens"])))
        for age, parts in cells.items():
            tokens = sum(n for _, n in parts)
            found[age].append((step["step"], sum(v * n for v, n in parts) / tokens))
    starts = sorted(found)
    names = [_lags(a, b) for a, b in zip(starts, [*starts[1:], None], strict=False)]
    return [Series(name, found[age]) for name, age in zip(names, starts, strict=True)]


def _lags(first: int, next_bucket: int | None) -> str:
    if next_bucket is None:
        return f"lag {first}+"
    return f"lag {first}" if next_bucket == first + 1 else f"lag {first} to {next_bucket - 1}"


def _served(steps: Sequence[Mapping[str, Any]]) -> list[Series]:
    found: dict[str, Points] = defaultdict(list)
    newest = [(float(s["step"]), float(s["version"])) for s in steps]
    for step in steps:
        for name, tag in _object(step["versions_served"]).items():
            try:
                found[name].append((step["step"], PolicyVersion.parse(str(tag)).version))
            except TrajectoryError:  # none yet
                found[name].append((step["step"], None))
    return [Series("learner", newest), *(Series(name, found[name]) for name in sorted(found))]


def _object(text: str | None) -> dict[str, Any]:
    value = json.loads(text) if text else {}
    return value if isinstance(value, dict) else {}


def _list(text: str | None) -> list[Any]:
    value = json.loads(text) if text else []
    return value if isinstance(value, list) else []


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
