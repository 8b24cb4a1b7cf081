"""A study's cells, and the file that its results go to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anabranch.deploy.lag_measures import Measuring
from anabranch.deploy.lag_study import OBJECTIVES, Cell, Study, make_study, open_results, read_rows
from anabranch.schemas.errors import ConfigError, TemporaryError, UsageError
from tests.lag_rows import make_row


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def study(model: Path, **changes: Any) -> Study:
    asked = {
        "preset": "tiny", "overrides": (), "model": model, "corrections": ["default", "none"], "lags": [0, 8], "lrs": [3e-4],
        "seeds": 2, "steps": 20, "measuring": Measuring(),
    }  # fmt: skip
    return make_study(**(asked | changes))


def result(**changes: Any) -> dict[str, Any]:
    names = ("correction", "lag", "lr", "seed", "steps", "settings")
    return {key: value for key, value in make_row("none", 0, **changes).items() if key not in names}


def test_every_combination_is_a_cell_seed_by_seed(model: Path) -> None:
    cells = study(model).cells
    assert len(cells) == 2 * 2 * 2
    assert cells[:2] == (Cell("dppo_tv", 0, 3e-4, 0, 20), Cell("dppo_tv", 8, 3e-4, 0, 20))
    assert [cell.seed for cell in cells] == [0] * 4 + [1] * 4
    assert len(study(model, corrections=["all"], lags=[0], seeds=1).cells) == len(OBJECTIVES)


def test_a_cells_configuration_is_what_its_name_says(model: Path) -> None:
    asked = study(
        model, corrections=["dppo_tv,narrow_with_age,tau=0.1", "gspo"], overrides=["learner.grad_clip=0.5"], seeds=1
    )
    config = asked.configs[Cell("dppo_tv,narrow_with_age,tau=0.1", 8, 3e-4, 0, 20)]
    assert (config.correction.narrow_with_age, config.correction.tau) == (True, 0.1)
    assert (config.learner.lr, config.learner.steps, config.learner.grad_clip) == (3e-4, 20, 0.5)
    assert asked.configs[Cell("gspo", 8, 3e-4, 0, 20)].correction.aggregation == "seq_mean_token_mean", (
        "its own defaults"
    )


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"corrections": ["nope"]}, ConfigError, "no objective 'nope'"),
        ({"corrections": ["ppo,nope=1"]}, ConfigError, "nope"),
        ({"corrections": ["ppo,clip_low=2"]}, ConfigError, "clip_low"),
        ({"corrections": ["none,narrow_with_age"]}, ConfigError, "nothing to narrow"),
        ({"corrections": ["default", "dppo_tv"]}, UsageError, "twice"),
        ({"corrections": []}, UsageError, "--objectives"),
        ({"lags": [0, -1]}, UsageError, "--lags -1"),
        ({"lrs": [0.0]}, UsageError, "--lrs 0"),
        ({"seeds": 0}, UsageError, "--seeds"),
        ({"overrides": ["learner.nope=1"]}, ConfigError, "nope"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(
    model: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        study(model, **changes)


def test_what_is_there_is_not_missing(model: Path, tmp_path: Path) -> None:
    asked, path = study(model), tmp_path / "out" / "lag.jsonl"
    with open_results(path, resume=False) as results:
        assert results.missing(asked) == list(asked.cells)
        for cell in asked.cells[:3]:
            results.add(cell, asked.settings(cell), result())
        assert results.missing(asked) == list(asked.cells[3:])
    with open_results(path, resume=True) as results:
        assert results.missing(asked) == list(asked.cells[3:])
        more = results.missing(study(model, lags=[0, 8, 16], seeds=1))
    assert more == [Cell(*name, 3e-4, 0, 20) for name in (("dppo_tv", 16), ("none", 8), ("none", 16))]


def test_results_are_not_mixed_up_by_accident(model: Path, tmp_path: Path) -> None:
    asked, path = study(model), tmp_path / "lag.jsonl"
    with open_results(path, resume=False) as results:
        results.add(asked.cells[0], asked.settings(asked.cells[0]), result())
    with pytest.raises(UsageError, match="--resume"), open_results(path, resume=False):
        pass
    other_settings = study(model, overrides=["learner.grad_clip=0.5"])
    other_measuring = study(model, measuring=Measuring(every=1))
    (model.parent / "other").mkdir()
    (model.parent / "other" / "model.safetensors").write_bytes(b"other weights")
    other_model = study(model.parent / "other")
    with open_results(path, resume=True) as results:
        for other in (other_settings, other_measuring, other_model):
            with pytest.raises(ConfigError, match=r"dppo_tv, lag 0, .* with other settings"):
                results.missing(other)


def test_two_studies_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "lag.jsonl"
    with (
        open_results(path, resume=True),
        pytest.raises(TemporaryError, match="another study"),
        open_results(path, resume=True),
    ):
        pass


def test_a_torn_line_is_a_cell_that_is_missing(model: Path, tmp_path: Path) -> None:
    asked, path = study(model), tmp_path / "lag.jsonl"
    with open_results(path, resume=False) as results:
        for cell in asked.cells[:2]:
            results.add(cell, asked.settings(cell), result())
    path.write_bytes(path.read_bytes()[:-20])
    assert len(read_rows(path)) == 1
    with open_results(path, resume=True) as results:
        assert results.missing(asked) == list(asked.cells[1:])
        results.add(asked.cells[1], asked.settings(asked.cells[1]), result())
    assert [json.loads(line)["lag"] for line in path.read_text().splitlines()] == [0, 8]


@pytest.mark.parametrize("content", ["not json\n", '{"other": 1}\n', "[]\n"])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lag.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match="not the results of a lag study"):
        read_rows(path)
    with pytest.raises(ConfigError), open_results(path, resume=True):
        pass
    assert path.read_text() == content
