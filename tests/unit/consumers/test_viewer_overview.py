"""From what the learner logged to the charts of the first page."""

from __future__ import annotations

import json
from typing import Any

from anabranch.consumers.viewer.overview import charts


def step(number: int, **changes: Any) -> dict[str, Any]:
    fields = dict.fromkeys(
        ("reward_mean", "in_flight_age_mean", "in_queue_age_mean", "ess_token", "ess_sequence", "masked_fraction", "delta_bytes", "changed_fraction",
         "wait_s", "step_s", "publish_s", "checkpoint_s", "loss", "grad_norm", "kl_k3"), 0.5,
    ) | dict.fromkeys(("queue_depth", "versions_served", "dropped", "tokens_per_s"), "{}") | {"drift": "[]"}  # fmt: skip
    return {"step": number, "version": number - 1, "epoch": 1} | fields | changes


def series(steps: list[dict[str, Any]], title: str) -> dict[str, list[tuple[float, float | None]]]:
    (chart,) = [c for c in charts(steps, []) if c.title == title]
    return {one.name: list(one.points) for one in chart.series}


def test_drift_by_lag_is_weighted_by_tokens_over_both_signs():
    cells = [
        {"age_from": 0, "advantage": "positive", "tokens": 30, "masked_fraction": 0.1},
        {"age_from": 0, "advantage": "negative", "tokens": 10, "masked_fraction": 0.5},
        {"age_from": 4, "advantage": "negative", "tokens": 5, "masked_fraction": 1.0},
        {"age_from": 8, "advantage": "negative", "tokens": 5, "masked_fraction": "NaN"},
    ]
    found = series([step(1, drift=json.dumps(cells))], "Masked by lag")
    assert list(found) == ["lag 0 to 3", "lag 4 to 7", "lag 8+"]
    assert found["lag 0 to 3"] == [(1, 0.2)]
    assert found["lag 4 to 7"] == [(1, 1.0)]


def test_a_region_that_a_step_does_not_name_holds_nothing():
    steps = [step(1, queue_depth='{"east": 3}'), step(2, queue_depth='{"west": 1}')]
    assert series(steps, "Groups held for later") == {"east": [(1, 3.0), (2, 0.0)], "west": [(1, 0.0), (2, 1.0)]}


def test_versions_served_beside_the_learners():
    steps = [step(1, versions_served='{"p": ""}'), step(2, versions_served='{"p": "e1.v1"}')]
    assert series(steps, "Versions served") == {"learner": [(1, 0), (2, 1)], "p": [(1, None), (2, 1)]}


def test_a_step_of_before_there_was_a_column_has_no_point():
    assert series([step(1, ess_sequence=None)], "Effective sample size")["trajectories"] == [(1, None)]
