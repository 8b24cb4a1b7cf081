"""Plots of any history are readable pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from anabranch.deploy.history import History, read_history
from anabranch.deploy.plots import smooth, write_plots
from anabranch.schemas.metrics import DriftRecord, StepRecord

NAMES = ["age.png", "bytes.png", "drift.png", "ess.png", "reward.png", "time.png"]


def pictures(folder: Path) -> dict[str, np.ndarray]:
    return {path.name: matplotlib.image.imread(path) for path in sorted(folder.glob("*.png"))}


def test_every_plot_is_a_picture_with_something_on_it(run_dir: Path) -> None:
    history = read_history(run_dir / "metrics.jsonl")
    paths = write_plots(history, run_dir / "plots", title="tiny-test")
    assert sorted(path.name for path in paths) == NAMES
    empty = run_dir / "empty"
    write_plots(History(), empty, title="tiny-test")
    blank = pictures(empty)
    for name, picture in pictures(run_dir / "plots").items():
        assert picture.shape[:2] == (540, 960)
        assert np.mean(np.any(picture != blank[name], axis=-1)) > 0.005, f"{name} shows no more than an empty run"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"delta_bytes": 0, "changed_fraction": 0.0},
        {"age_tokens": {}},
        {"tokens_per_s": {}},
        {"age_tokens": {300: 5}},
        {"drift": []},
    ],
    ids=["one step", "no change", "no ages", "no regions", "very old", "no drift"],
)
def test_odd_histories_plot_too(
    tmp_path: Path, step_record: Callable[..., StepRecord], changes: dict[str, object]
) -> None:
    history = History()
    history.add(step_record(1, **changes))
    write_plots(history, tmp_path, title="odd")
    assert sorted(pictures(tmp_path)) == NAMES


def test_the_drift_of_an_age_that_one_step_alone_has_can_be_seen(
    tmp_path: Path, step_record: Callable[..., StepRecord]
) -> None:
    figures = dict.fromkeys(
        ["ratio_mean", "ratio_max", "ratio_p99", "log_ratio_abs_mean", "log_ratio_abs_max", "kl_k1", "kl_k2", "ess_token",
         "masked_fraction", "kept_mass", "entropy"], 0.0,
    )  # fmt: skip
    drawn = []
    for name, kl in (("low", 1e-4), ("high", 1e-2)):
        history = History()
        for step, age in ((1, 0), (2, 1), (3, 2)):
            value = kl if age == 1 else 1e-3 * 10 ** (age - 1)  # the axis is that of the ages beside it
            cell = DriftRecord(age_from=age, advantage="positive", tokens=5, kl_k3=value, **figures)
            history.add(step_record(step, drift=[cell]))
        write_plots(history, tmp_path / name, title="one each")
        drawn.append(pictures(tmp_path / name)["drift.png"])
    assert (drawn[0] != drawn[1]).any(axis=-1).sum() > 10


def test_smoothing_is_a_mean_over_what_there_is() -> None:
    assert smooth([1.0, 3.0, 5.0, 7.0], window=2).tolist() == [1.0, 2.0, 4.0, 6.0]
    assert smooth([], window=3).tolist() == []
