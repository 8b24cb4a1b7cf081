"""Pages of steps: the list, and one step with its rollouts. From a reader's rows to what a template shows.

Invariant: what a step computed is shown from its record; where there is none, what the learner logged, and that it is no more. Held by
tests/unit/consumers/test_viewer_steps.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from anabranch.consumers.run_reader import RunReader
from anabranch.schemas.errors import UsageError

ROWS = 100
MOST_ROLLOUTS = 2000
BINS = 24
_LIST = (
    "SELECT s.epoch, s.step, s.reward_mean, s.loss, s.grad_norm, s.ratio_max, s.masked_fraction, s.ess_token, s.rollouts, s.skipped_groups, "
    "s.time_ms, f.step IS NOT NULL AS recorded FROM steps s LEFT JOIN facts f ON f.epoch = s.epoch AND f.step = s.step "
    "ORDER BY s.time_ms DESC LIMIT ? OFFSET ?"
)
_ROLLOUTS = (
    "SELECT region, producer, seq, sample_index, group_index, row, update, applied, tokens, age_max, advantage, weight, ratio_mean, ratio_max, "
    "kept_fraction, loss_share, url_encode(region) || '/' || url_encode(producer) || '/' || seq || '/' || sample_index AS id "
    "FROM rollouts WHERE epoch = ? AND step = ? ORDER BY row LIMIT ?"
)


@dataclass(frozen=True, slots=True)
class StepPage:
    """`logged`: its line of metrics.jsonl; `facts`: of its record, None if it has none. `drift`: by lag and sign of the advantage."""

    epoch: int
    step: int
    logged: dict[str, Any] | None
    facts: dict[str, Any] | None
    drift: list[dict[str, Any]] = field(default_factory=list)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    ratios: list[tuple[str, int]] = field(default_factory=list)


def step_list(reader: RunReader, *, number: int) -> tuple[list[dict[str, Any]], int]:
    """A page of steps, newest first, and how many there are."""
    rows = reader.rows(_LIST, [ROWS, ROWS * (number - 1)])
    (total,) = reader.rows("SELECT count(*) AS n FROM steps")
    return rows, total["n"]


def step_page(reader: RunReader, epoch: int, step: int) -> StepPage:
    """Raises UsageError: nothing tells of that step."""
    logged = reader.rows(
        "SELECT * FROM steps WHERE epoch = ? AND step = ? ORDER BY time_ms DESC LIMIT 1", [epoch, step]
    )
    facts = reader.rows("SELECT * FROM facts WHERE epoch = ? AND step = ?", [epoch, step])
    if not logged and not facts:
        raise UsageError(f"neither metrics.jsonl nor a record tells of step {step} of epoch {epoch}")
    rollouts = reader.rows(_ROLLOUTS, [epoch, step, MOST_ROLLOUTS]) if facts else []
    return StepPage(
        epoch, step,
        logged=logged[0] if logged else None,
        facts=_told(facts[0]) if facts else None,
        drift=json.loads(logged[0]["drift"] or "[]") if logged else [],
        rollouts=rollouts,
        ratios=histogram([r["ratio_mean"] for r in rollouts if r["ratio_mean"] is not None]),
    )  # fmt: skip


def _told(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts with their tables as objects."""
    tables = {
        name: json.loads(facts[name] or "null")
        for name in ("updates", "groups", "zero_variance", "skipped", "alarms", "packages")
    }
    return facts | tables


def histogram(values: Sequence[float], bins: int = BINS) -> list[tuple[str, int]]:
    """(range, how many) of finite values, in `bins` equal parts of what they span."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return []
    low, high = min(finite), max(finite)
    if low == high:
        return [(f"{low:.4g}", len(finite))]
    counts = [0] * bins
    for value in finite:
        counts[min(bins - 1, int((value - low) / (high - low) * bins))] += 1
    edges = [low + (high - low) * k / bins for k in range(bins + 1)]
    return [(f"{edges[k]:.3f} to {edges[k + 1]:.3f}", counts[k]) for k in range(bins)]
