"""What stands around a conversion for another number of ranks; the conversion itself is tested in tests/e2e/test_world_size.py."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from anabranch.learner import universal
from anabranch.learner.checkpoint_folder import MARKER
from anabranch.learner.universal import DATA_ONLY, as_universal, await_universal, is_universal, make_universal
from anabranch.schemas.errors import CheckpointError, DeadlineError, TemporaryError
from tests.checkpoint_stores import Counter, store


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return store(tmp_path).save(Counter(2), {})


class Conversions:
    """In place of DeepSpeed's."""

    def __init__(self) -> None:
        self.done = 0
        self.error: Exception | None = None

    def __call__(self, source: Path, target: Path, marker: object, heartbeat: object) -> None:
        self.done += 1
        target.mkdir()
        (target / "weights.pt").write_text(f"{source} {self.done}")
        (target.parent / "latest_universal").touch()
        if self.error is not None:
            raise self.error


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> Conversions:
    made = Conversions()
    monkeypatch.setattr(universal, "_convert", made)
    return made


def test_it_is_made_once(place: Path, conversions: Conversions):
    made = make_universal(place)
    assert made.name == "universal-step-00000002"
    assert sorted(p.name for p in made.iterdir()) == [MARKER, "deepspeed", "source.json"]
    assert make_universal(place) == made
    assert conversions.done == 1


def test_one_that_is_not_complete_is_made_again(place: Path, conversions: Conversions):
    (make_universal(place) / MARKER).unlink()
    place.with_name(".universal-step-00000002.tmp").mkdir()
    make_universal(place)
    assert conversions.done == 2
    assert sorted(p.name for p in place.parent.iterdir()) == ["step-00000002", "universal-step-00000002"]


def test_it_counts_only_for_the_very_checkpoint_it_was_made_from(tmp_path: Path, place: Path, conversions: Conversions):
    make_universal(place)
    shutil.rmtree(place)
    assert store(tmp_path).save(Counter(2), {"another": "line"}) == place
    make_universal(place)
    assert conversions.done == 2


def test_one_that_is_damaged_is_refused_by_name(place: Path, conversions: Conversions):
    weights = make_universal(place) / "deepspeed" / "weights.pt"
    weights.write_text(weights.read_text().swapcase())
    with pytest.raises(CheckpointError, match=r"weights.pt is damaged: .*; remove that folder"):
        make_universal(place)


@pytest.mark.parametrize(
    ("error", "becomes"),
    [(OSError(28, "No space left on device"), TemporaryError), (CheckpointError("no"), CheckpointError)],
)
def test_a_conversion_that_fails_leaves_nothing_behind(place: Path, conversions: Conversions, error, becomes):
    conversions.error = error
    with pytest.raises(becomes):
        make_universal(place)
    assert [p.name for p in place.parent.iterdir()] == ["step-00000002"]
    conversions.error = None
    make_universal(place)


def test_what_the_program_dies_of_is_named(place: Path):
    """The real one, of a checkpoint without a file of DeepSpeed's."""
    beats: list[int] = []
    with pytest.raises(CheckpointError, match=r"step-00000002 cannot be converted for another number of ranks .*: \w+"):
        make_universal(place, heartbeat=lambda: beats.append(1))
    assert beats
    assert [p.name for p in place.parent.iterdir()] == ["step-00000002"]


def test_a_conversion_that_hangs_is_ended_at_a_deadline(place: Path, monkeypatch):
    monkeypatch.setattr(universal, "file_deadline_s", lambda _: 0.0)
    with pytest.raises(DeadlineError, match="to be converted for another number of ranks"):
        make_universal(place)


def test_the_other_ranks_wait_for_that_of_this_checkpoint(
    tmp_path: Path, place: Path, conversions: Conversions, monkeypatch
):
    make_universal(place)
    shutil.rmtree(place)
    store(tmp_path).save(Counter(2), {"another": "line"})
    with monkeypatch.context() as patch:
        patch.setattr(universal, "file_deadline_s", lambda _: 0.0)
        with pytest.raises(DeadlineError, match=r"rank 0 to convert .*step-00000002 for another number of ranks"):
            await_universal(place)
    made = threading.Timer(0.05, make_universal, [place])
    made.start()
    await_universal(place)
    made.join()
    assert is_universal(place)


class Payload:
    """What a hostile file would hold: unpickling it creates a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.target,)


def test_reading_one_runs_no_code_from_it(tmp_path: Path):
    """DeepSpeed asks for the full unpickler by name."""

    class Config:
        load_universal_checkpoint = False

    class Engine:
        _config = Config()

    torch.save({"param": Payload(tmp_path / "ran")}, tmp_path / "fp32.pt")
    with as_universal(Engine()):
        assert Config.load_universal_checkpoint is not Engine._config.load_universal_checkpoint
        with pytest.raises(Exception, match="Weights only load failed"):
            torch.load(tmp_path / "fp32.pt", weights_only=False)
    assert not (tmp_path / "ran").exists()
    assert DATA_ONLY not in os.environ
    assert Engine._config.load_universal_checkpoint is False
