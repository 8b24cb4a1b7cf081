"""What is said of a study follows from its results by stated rules."""

from __future__ import annotations

import pytest

from anabranch.deploy.lag_summary import MARGIN, Summary, has_collapsed, late_reward, summarise
from tests.lag_rows import make_row


def one(rows: list[dict[str, object]]) -> Summary:
    (summary,) = summarise(rows)
    return summary


def test_seeds_are_put_together() -> None:
    entry = one([make_row("ppo", 8, seed, end=end) for seed, end in enumerate((0.8, 0.9, 1.0))]).entries["ppo", 8]
    assert entry.seeds == 3
    assert entry.late == pytest.approx(0.9)
    assert entry.whole == pytest.approx(0.65 * 0.5 + 0.9 * 0.5), "a line up for one half, level for the other"
    assert entry.train == pytest.approx(0.9)
    assert entry.ess == pytest.approx(0.92), "steps without gradient have none"
    assert entry.masked == pytest.approx(0.008)
    assert entry.alarmed == pytest.approx(8 / 20)
    assert entry.curve[-1] == (20, pytest.approx(0.9), 0.8, 1.0)
    assert entry.collapsed == 0


def test_learning_rates_and_lengths_are_summaries_of_their_own() -> None:
    rows = [make_row("ppo", 0, lr=lr) for lr in (3e-4, 1e-4)] + [
        make_row("ppo", 0, steps=40, heldout=[[0, 0.4], [40, 0.9]])
    ]
    assert [(s.lr, s.steps) for s in summarise(rows)] == [(1e-4, 20), (3e-4, 20), (3e-4, 40)]


def test_what_is_kept_compares_the_same_seeds() -> None:
    rows = [make_row("ppo", 0, 0, end=0.8), make_row("ppo", 0, 1, end=1.0), make_row("ppo", 8, 0, end=0.6)]
    assert one(rows).kept("ppo", 8) == pytest.approx(0.6 / 0.8)
    assert one(rows).kept("ppo", 4) is None


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [((0.1, 0.2, 0.05), "better"), ((0.1, 0.2, -0.01), "alike"), ((-0.1, -0.2), "worse"), ((MARGIN / 2,) * 3, "alike")],
)
def test_better_or_worse_needs_all_seeds_and_a_margin(differences: tuple[float, ...], verdict: str) -> None:
    rows = [make_row("none", 8, seed, end=0.6) for seed in range(len(differences))]
    rows += [make_row("ppo", 8, seed, end=0.6 + difference) for seed, difference in enumerate(differences)]
    assert one(rows).against("ppo", 8) == verdict
    assert one(rows).against("none", 8) == "alike"


def test_nothing_is_said_where_nothing_can_be_compared() -> None:
    assert one([make_row("ppo", 8, 0), make_row("none", 8, 1)]).against("ppo", 8) == ""
    assert one([make_row("ppo", 8)]).against("ppo", 8) == ""


def test_a_run_below_its_beginning_or_without_an_end_has_collapsed() -> None:
    assert has_collapsed(make_row("ppo", 8, end=0.39))
    assert not has_collapsed(make_row("ppo", 8, end=0.41))
    stopped = make_row("ppo", 8, stopped="step 12: loss = nan", heldout=[[0, 0.4], [5, 0.6], [10, 0.8]])
    assert has_collapsed(stopped)
    assert late_reward(stopped) == 0.0, "a run that has no end has not earned its last figure"
    entry = one([stopped]).entries["ppo", 8]
    assert (entry.collapsed, entry.stopped) == (1, 1)
    assert entry.whole == pytest.approx((0.5 * 5 + 0.7 * 5 + 0.4 * 10) / 20)
