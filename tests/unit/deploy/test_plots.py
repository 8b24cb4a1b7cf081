"""Plots of any history are readable pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from anabranch.deploy.history import History, read_history
from anabranch.deploy.plots import smooth, write_plots
from anabranch.schemas.metrics import StepRecord

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


def test_smoothing_is_a_mean_over_what_there_is() -> None:
    assert smooth([1.0, 3.0, 5.0, 7.0], window=2).tolist() == [1.0, 2.0, 4.0, 6.0]
    assert smooth([], window=3).tolist() == []
