"""The delta commands as a user meets them: what is printed, one line for a mistake, exit codes, and the page in docs."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from anabranch.cli.main import main
from tests.checkpoints import load, random_state, raw, save, step
from tests.limits import file_size_limit

PAGE = Path(__file__).resolve().parents[2] / "docs" / "delta-tools.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """OLD and NEW as files, OLD-folder and NEW-folder as shards; the working directory."""
    monkeypatch.chdir(tmp_path)
    old = random_state()
    new = step(old)
    for name, state in (("OLD", old), ("NEW", new)):
        save(tmp_path / name, state)
        save(tmp_path / f"{name}-folder", state, shards=2)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["delta", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def mistake(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    """The one line on stderr."""
    before = sorted(os.listdir())
    got, out, err = run(capsys, *arguments)
    assert (got, out) == (code, ""), err
    assert err.startswith("anabranch delta: ")
    assert err.count("\n") == 1
    assert sorted(os.listdir()) == before
    return err


def test_the_whole_way(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "diff", "OLD", "NEW", "-o", "step.delta", "--base-version", "6", "--run", "exp3")
    assert (code, err) == (0, "")
    assert re.match(r"wrote step\.delta: [\d,]+ bytes, [\d,]+ of [\d,]+ elements changed, \d\.\d{3} bytes each\n", out)
    assert run(capsys, "apply", "OLD-folder", "step.delta", "-o", "out")[0] == 0
    assert raw(load(folder / "out")) == raw(load(folder / "NEW"))
    code, out, _ = run(capsys, "show", "step.delta")
    assert "run              exp3, epoch 0\nversion          6 -> 7\n" in out
    about = json.loads(run(capsys, "show", "step.delta", "--json")[1])
    assert (about["base"]["version"], about["version"], about["kind"]) == (6, 7, "delta")
    code, out, _ = run(capsys, "verify", "step.delta", "--base", "OLD", "--result", "NEW-folder")
    assert (code, len(out.splitlines())) == (0, 5)
    assert "changed OLD, digest" in run(capsys, "apply", "OLD", "step.delta", "--in-place")[1]
    assert "nothing to do" in run(capsys, "apply", "OLD", "step.delta", "--in-place")[1]
    assert "all of the model" in run(capsys, "diff", "--anchor", "NEW", "-o", "full.delta")[1]
    assert run(capsys, "apply", "full.delta", "-o", "again.safetensors", "--threads", "3")[0] == 0
    assert raw(load(folder / "again.safetensors")) == raw(load(folder / "NEW"))


def test_versions_of_a_diff(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in [
        ([], (0, 1)),
        (["--version", "5"], (4, 5)),
        (["--base-version", "5"], (5, 6)),
        (["--base-version", "2", "--version", "8"], (2, 8)),
    ]:
        run(capsys, "diff", "OLD", "NEW", "-o", "d", *arguments)
        about = json.loads(run(capsys, "show", "d", "--json")[1])
        assert (about["base"]["version"], about["version"]) == expected
    run(capsys, "diff", "--anchor", "NEW", "-o", "d", "--version", "9", "--epoch", "2")
    about = json.loads(run(capsys, "show", "d", "--json")[1])
    assert (about["base"], about["version"], about["epoch"], about["kind"]) == (None, 9, 2, "anchor")


@pytest.mark.parametrize(
    "arguments",
    [
        "diff OLD -o d",
        "diff OLD NEW",
        "diff --anchor OLD NEW -o d",
        "diff --anchor NEW -o d --base-version 1",
        "diff OLD NEW -o d --version 3 --base-version 3",
        "diff OLD NEW -o d --version 0",
        "diff OLD NEW -o d --version -1",
        "diff OLD NEW -o d --threads 0",
        "diff OLD NEW -o d --threads many",
        "apply OLD d",
        "apply OLD d -o x --in-place",
        "apply d --in-place",
        "apply OLD d --in-place --force",
        "merge d -o x",
        "show",
        "",
    ],
)
def test_a_wrong_command_line_is_2_with_its_usage(
    folder: Path, arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["delta", *arguments.split()])
    assert end.value.code == 2
    assert "usage: anabranch delta" in capsys.readouterr().err
    assert sorted(os.listdir()) == ["NEW", "NEW-folder", "OLD", "OLD-folder"]


def test_a_file_that_is_not_there_is_2_with_its_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "diff", "OLD", "NEW", "-o", "d")
    for arguments in (
        "diff nobody NEW -o x", "diff OLD nobody -o x", "apply nobody d -o x", "apply OLD nobody -o x", "show nobody",
        "merge d nobody -o x", "verify nobody", "verify d --base nobody", "apply nobody d --in-place",
    ):  # fmt: skip
        assert "nobody: No such file" in mistake(capsys, 2, *arguments.split())
    assert "no folder nowhere" in mistake(capsys, 2, "diff", "OLD", "NEW", "-o", "nowhere/x")


def test_a_file_of_another_kind_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "diff", "OLD", "NEW", "-o", "d")
    assert "NEW: not a delta file" in mistake(capsys, 76, "apply", "OLD", "NEW", "-o", "x")
    assert "d is not a readable safetensors file: it is a delta file" in mistake(
        capsys, 76, "diff", "d", "NEW", "-o", "x"
    )
    assert "OLD-folder: Is a directory" in mistake(capsys, 2, "show", "OLD-folder")
    (folder / "empty").mkdir()
    assert "there is no model.safetensors in it" in mistake(capsys, 76, "diff", "empty", "NEW", "-o", "x")
    assert "not a delta file; remove it" in mistake(capsys, 2, "diff", "OLD", "NEW", "-o", "NEW")
    assert "is a folder" in mistake(capsys, 2, "diff", "OLD", "NEW", "-o", "NEW-folder")


def test_damaged_files_are_76(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "diff", "OLD", "NEW", "-o", "d")
    content = (folder / "d").read_bytes()
    (folder / "d").write_bytes(content[:-1])
    assert "d: its header tells of" in mistake(capsys, 76, "verify", "d")
    (folder / "d").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "is damaged" in mistake(capsys, 76, "apply", "OLD", "d", "-o", "x")
    whole = (folder / "OLD").read_bytes()
    (folder / "OLD").write_bytes(whole[:-1])
    assert "OLD is not a readable safetensors file" in mistake(capsys, 76, "diff", "OLD", "NEW", "-o", "x")


def test_what_may_not_be_read_or_written_is_2(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: object, *_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("anabranch.transport.delta_file.os.open", denied)  # root may read everything
    assert "d: Permission denied" in mistake(capsys, 2, "show", "d")


@pytest.mark.parametrize(
    "arguments", ["diff OLD NEW -o x", "apply OLD d -o x", "apply OLD d --in-place", "merge d e -o x"]
)
def test_a_full_disk_is_75_and_leaves_nothing(folder: Path, arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    save(folder / "NEWER", step(load(folder / "NEW"), seed=5))
    run(capsys, "diff", "OLD", "NEW", "-o", "d")
    run(capsys, "diff", "NEW", "NEWER", "-o", "e")
    before = (folder / "OLD").read_bytes()
    with file_size_limit(200):
        code = main(["delta", *arguments.split(), "--threads", "1"])
    assert code == 75
    assert "File too large" in capsys.readouterr().err
    assert sorted(os.listdir()) == ["NEW", "NEW-folder", "NEWER", "OLD", "OLD-folder", "d", "e"]
    assert (folder / "OLD").read_bytes() == before


def test_weights_that_were_not_copied_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "OLD-folder" / "pytorch_model.bin").write_bytes(b"x")
    run(capsys, "diff", "OLD", "NEW", "-o", "d")
    code, _, err = run(capsys, "apply", "OLD-folder", "d", "-o", "out")
    assert code == 0
    assert "not copied" in err
    assert "pytorch_model.bin" in err


# --- docs/delta-tools.md


def shown() -> list[tuple[str, str]]:
    """Each console block of the page: its command lines, and what it says that they print."""
    blocks = re.findall(r"^```console\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [(line[2:], block) for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@pytest.mark.process
@pytest.mark.timeout(110)
def test_every_command_of_the_page_runs_as_written(tmp_path: Path) -> None:
    """In the order of the page, in one folder, with the two checkpoints that its beginning asks for."""
    old = {f"model.layers.{i}.mlp.weight": (torch.randn(64, 64) * 0.02).bfloat16() for i in range(4)}
    states = [old]
    for seed in (1, 2, 3):
        states.append(step(states[-1], share=0.02, seed=seed))
    save(tmp_path / "v6", states[0], shards=2)
    for number, state in enumerate(states[1:], 7):
        save(tmp_path / f"v{number}", state, shards=2)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "anabranch").write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -m anabranch.cli.main "$@"\n'
    )
    (bin_folder / "anabranch").chmod(0o755)
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    commands = shown()
    assert len(commands) >= 10
    for command, _ in commands:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
