"""The command line of `anabranch replay step`: what it refuses before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.cli.main import main
from tests.step_records import facts, rows_of, write_rank


def run(*args: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["replay", "step", *args])
    return code, capsys.readouterr().err


def record(directory: Path) -> None:
    folder = directory / "steps/epoch=1/000004"
    write_rank(folder, 0, rows_of(facts()))
    (folder / "facts.json").write_bytes(facts().to_json())


@pytest.mark.parametrize("args", [(), ("4", "--random", "2")])
def test_it_wants_one_step_or_a_number_of_random_ones(args: tuple[str, ...], tmp_path: Path, capsys):
    record(tmp_path)
    code, said = run(*args, "--run", str(tmp_path), capsys=capsys)
    assert (code, "the number of a step, or --random N" in said) == (2, True)


def test_a_model_that_is_gone_is_named_with_what_to_do(tmp_path: Path, capsys):
    record(tmp_path)
    (tmp_path / "resolved.toml").write_text('[model]\npath = "/nowhere/model"\n')
    code, said = run("4", "--run", str(tmp_path), capsys=capsys)
    assert code == 78
    assert "the model is not at /nowhere/model" in said
    assert "--model FOLDER" in said


def test_a_step_without_a_record_is_refused_with_those_that_are_there(tmp_path: Path, capsys):
    record(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    code, said = run("9", "--run", str(tmp_path), capsys=capsys)
    assert (code, "no record of step 9; recorded: steps 4 to 4" in said) == (2, True)
    code, said = run("4", "--epoch", "7", "--run", str(tmp_path), capsys=capsys)
    assert (code, "no record of step 4 of epoch 7" in said) == (2, True)


def test_no_run_no_step(tmp_path: Path, capsys):
    code, said = run("4", "--run", str(tmp_path / "none"), capsys=capsys)
    assert (code, "there is no run directory" in said) == (2, True)
