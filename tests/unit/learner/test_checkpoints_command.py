"""`anabranch checkpoints`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabranch.cli.main import main
from anabranch.learner.checkpoint_folder import MARKER, size_and_digest
from anabranch.learner.universal import SOURCE_FILE
from tests.checkpoint_stores import Counter, store


class Engine(Counter):
    def save(self, directory: Path, client_state: dict[str, object]) -> None:
        super().save(directory, client_state)
        (directory / "engine.json").write_text(json.dumps({"step": self.step, "world_size": 2, "zero_stage": 1}))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = store(tmp_path, keep=5)
    for step in (20, 30, 40, 50):
        made.save(Engine(step), {})
    (tmp_path / "check points").rename(tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def checkpoints(directory: Path, *arguments: str) -> int:
    settings = [f"run.dir={directory.parent.parent}", f"run.name={directory.parent.name}", "learner.keep_every=20"]
    return main(["checkpoints", *(f"--set={s}" for s in settings), *arguments])


def test_it_says_what_keeps_each_and_what_else_takes_room(directory: Path, capsys: pytest.CaptureFixture[str]):
    place, universal = directory / "step-00000040", directory / "universal-step-00000040"
    universal.mkdir()
    source = json.dumps({"marker": size_and_digest(place / MARKER)[1]})
    (universal / SOURCE_FILE).write_text(source)
    (universal / MARKER).write_bytes(bytes(1234 - len(source)))
    for without in ("universal-step-00000030", "universal-step-00000010"):  # a marker; a checkpoint
        (directory / without).mkdir()
    (directory / ".step-00000060.tmp").mkdir()
    (directory / "step-00000060").mkdir()
    assert checkpoints(directory, "--give-up-above", "40") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "step-00000050 is given-up-step-00000050.0 now"
    text = "\n".join(said)
    for step, why in ((20, "of every 20 steps"), (30, "one of the newest"), (40, "the newest; of every 20 steps")):
        at = next(i for i, line in enumerate(said) if line.startswith(f"step {step:>8}"))
        assert said[at + 1].strip() == why
    assert "2 ranks, stage 1 + 1,234 for any number" in text
    assert f"unfinished: 0 bytes  {directory}/.step-00000060.tmp" in said
    for unfinished in ("step-00000060", "universal-step-00000030", "universal-step-00000010"):
        assert f"unfinished: 0 bytes  {directory}/{unfinished}" in said
    assert any(line.startswith("given up: ") and line.endswith("given-up-step-00000050.0") for line in said)
    assert said[-1] == "the learner resumes from step 40"


def test_json(directory: Path, capsys: pytest.CaptureFixture[str]):
    assert checkpoints(directory, "--set=learner.keep_checkpoints=1", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {c["step"]: c["kept"] for c in found["checkpoints"]} == {
        20: "of every 20 steps", 30: "", 40: "of every 20 steps", 50: "the newest",
    }  # fmt: skip
    assert found["others"] == found["given_up"] == []


def test_what_cannot_be_done_is_named(directory: Path, capsys: pytest.CaptureFixture[str]):
    assert checkpoints(directory, "--convert", "25") == 78
    assert "no complete checkpoint of step 25" in capsys.readouterr().err
    (directory / "step-00000050" / "client.json").unlink()
    assert checkpoints(directory, "--convert", "50") == 78
    assert "client.json is missing" in capsys.readouterr().err
    (directory / "step-00000050" / MARKER).write_text("{}")
    assert checkpoints(directory) == 78
    assert "not a checkpoint marker" in capsys.readouterr().err
