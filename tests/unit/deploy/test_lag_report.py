"""The page of a study: made from the results file alone, and nothing outside its marks is touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anabranch.deploy.lag_report import BEGIN, END, write_report
from anabranch.schemas.errors import ConfigError
from tests.lag_rows import make_row

ROWS = [make_row(name, lag, seed, end=end if lag else 0.9)
        for name, end in (("none", 0.3), ("dppo_tv", 0.88), ("gspo", 0.7)) for lag in (0, 8) for seed in range(2)]  # fmt: skip


def results(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "lag.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_tables_and_verdicts_come_from_the_results(tmp_path: Path) -> None:
    page, figures, *plots = write_report(results(tmp_path, ROWS), tmp_path / "out")
    text = page.read_text()
    assert (
        "the default (`dppo_tv`) keeps 0.978 of the reward (aim ≥ 0.95: met); without correction (`none`) 0.333 is kept"
        in text
    )
    assert (
        "Lag 8: 1 of 3 keep ≥ 0.95 of their reward at lag 0 (`dppo_tv`); better than `none`: `dppo_tv`, `gspo`; worse"
        in text
    )
    assert "| `none` | 0.900 | 0.300 (0.33) †2 |" in text
    assert "| `gspo` | 0.900 | 0.700 (0.78) |" in text
    assert "| `none` | 0.92 (0.92) / 0.8% / 40% |" in text
    for plot in plots:
        assert f"]({plot.name})" in text
        assert plot.read_bytes().startswith(b"<?xml")
    assert len(plots) == 2
    found = json.loads(figures.read_text())
    assert len(found["cells"]) == len(ROWS)
    assert {e["correction"]: e["against_none"] for e in found["summaries"][0]["entries"] if e["lag"] == 8} == {
        "none": "alike", "dppo_tv": "better", "gspo": "better",
    }  # fmt: skip


def test_a_missed_target_is_called_missed(tmp_path: Path) -> None:
    rows = [make_row("dppo_tv", 0, end=0.9), make_row("dppo_tv", 8, end=0.8)]
    page, *_ = write_report(results(tmp_path, rows), tmp_path)
    assert "keeps 0.889 of the reward (aim ≥ 0.95: **missed**)" in page.read_text()


def test_words_by_hand_survive_and_figures_are_replaced(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"# Words\n\n{BEGIN}\nold figures\n{END}\n\nmore words \\1\n")
    write_report(results(tmp_path, ROWS), tmp_path)
    once = page.read_text()
    assert once.startswith("# Words\n\n" + BEGIN)
    assert once.endswith(END + "\n\nmore words \\1\n")
    assert "old figures" not in once
    write_report(results(tmp_path, ROWS), tmp_path)
    assert page.read_text() == once, "the same results, the same page"


def test_the_plots_are_functions_of_the_results(tmp_path: Path) -> None:
    first, second = (write_report(results(tmp_path, ROWS), tmp_path / name)[2:] for name in ("one", "two"))
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


def test_a_study_of_one_cell_is_reported(tmp_path: Path) -> None:
    page, *_ = write_report(results(tmp_path, [make_row("ppo", 4)]), tmp_path)
    assert "| `ppo` | 0.900 |" in page.read_text()


@pytest.mark.parametrize("text", ["# without marks\n", f"{END}\n{BEGIN}\n", f"{BEGIN}\n{END}\n{BEGIN}\n{END}\n"])
def test_a_page_without_its_marks_is_left_alone(tmp_path: Path, text: str) -> None:
    page = tmp_path / "README.md"
    page.write_text(text)
    with pytest.raises(ConfigError, match=r"README\.md must have the line"):
        write_report(results(tmp_path, ROWS), tmp_path)
    assert page.read_text() == text
    assert not list(tmp_path.glob("*.svg"))


def test_no_results_are_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no results yet"):
        write_report(results(tmp_path, []), tmp_path)
