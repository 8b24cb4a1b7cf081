"""What stands around a conversion for another number of ranks; the conversion itself is tested in tests/e2e/test_world_size.py."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from anabranch.learner import checkpoint_folder, universal, universal_files
from anabranch.learner.checkpoint_folder import MARKER
from anabranch.learner.conversion_lock import converting
from anabranch.learner.deepspeed_files import deepspeed_classes
from anabranch.learner.universal import DATA_ONLY, as_universal, await_universal, is_universal, make_universal
from anabranch.schemas.config import GateSection
from anabranch.schemas.errors import CheckpointError, DeadlineError, TemporaryError
from tests.checkpoint_stores import Counter, store
from tests.unit.learner.conftest import OPEN, make_batch

SKIPPED = OPEN.model_copy(update={"ess": 1.0, "ess_action": "skip"})


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return store(tmp_path).save(Counter(2), {})


class Conversions:
    """In place of DeepSpeed's."""

    def __init__(self) -> None:
        self.done = 0
        self.error: Exception | None = None
        self.meanwhile: Callable[[], object] = lambda: None

    def __call__(self, source: Path, target: Path, marker: object, heartbeat: object) -> None:
        self.done += 1
        target.mkdir()
        (target / "weights.pt").write_text(f"{source} {self.done}")
        (target.parent / "latest_universal").touch()
        self.meanwhile()
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


def test_a_disk_that_is_full_when_a_conversion_should_be_marked_has_its_room_again(
    place: Path, conversions: Conversions, monkeypatch
):
    def full(path: Path, _: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint_folder, "write_atomically", full)
    with pytest.raises(TemporaryError, match="make room"):
        make_universal(place)
    assert [p.name for p in place.parent.iterdir()] == ["step-00000002"]


def test_what_the_program_dies_of_is_named(place: Path):
    """The real one, of a checkpoint without a file of DeepSpeed's."""
    beats: list[int] = []
    with pytest.raises(CheckpointError, match=r"step-00000002 cannot be converted for another number of ranks .*: \w+"):
        make_universal(place, heartbeat=lambda: beats.append(1))
    assert beats
    assert [p.name for p in place.parent.iterdir()] == ["step-00000002"]


def test_a_learner_that_goes_on_meanwhile_leaves_it_and_what_it_is_made_from_alone(
    tmp_path: Path, place: Path, conversions: Conversions
):
    """The next checkpoint removes what a crash left aside, and old checkpoints."""
    conversions.meanwhile = lambda: store(tmp_path, keep=1).save(Counter(3), {})
    assert (make_universal(place) / MARKER).exists()
    assert is_universal(place)
    store(tmp_path, keep=1).save(Counter(4), {})
    assert [p.name for p in place.parent.iterdir()] == ["step-00000004"], "both go with the next"


def test_two_that_convert_the_same_one_take_turns(place: Path, conversions: Conversions):
    """A learner that needs it, and `anabranch checkpoints --convert`."""
    second = threading.Thread(target=make_universal, args=(place,))

    def meanwhile() -> None:
        second.start()
        second.join(0.3)
        assert second.is_alive(), "it waits"

    conversions.meanwhile = meanwhile
    made = make_universal(place)
    second.join(30)
    assert conversions.done == 1
    assert (made / "deepspeed" / "weights.pt").read_text().endswith(" 1")


def test_a_wait_for_the_conversion_of_another_process_has_a_deadline(place: Path, monkeypatch):
    monkeypatch.setattr(universal, "file_deadline_s", lambda _: 0.2)
    beats: list[int] = []
    with (
        converting(place, deadline_s=0),
        pytest.raises(DeadlineError, match=r"another process to convert .*step-00000002"),
    ):
        make_universal(place, heartbeat=lambda: beats.append(1))
    assert beats


def test_a_conversion_that_the_system_ends_can_be_tried_again(place: Path):
    """For want of memory, say."""

    def children() -> set[int]:
        return set(map(int, Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()))

    others = children()  # servers that tests share

    def kill() -> None:
        for child in children() - others:
            os.kill(child, signal.SIGKILL)

    with pytest.raises(TemporaryError, match="killed by signal 9"):
        make_universal(place, heartbeat=kill)
    assert [p.name for p in place.parent.iterdir()] == ["step-00000002"]


def test_a_conversion_that_hangs_is_ended_at_a_deadline(place: Path, monkeypatch):
    monkeypatch.setattr(universal, "file_deadline_s", lambda _: 0.0)
    with pytest.raises(DeadlineError, match="to be converted for another number of ranks"):
        make_universal(place)


@pytest.mark.parametrize(
    ("stage", "to", "compute", "gates"),
    [(1, 2, "float32", OPEN), (1, 2, "float32", SKIPPED), (3, 1, "bfloat16", SKIPPED)],
    ids=["1 to 2, step 0", "1 to 2, skipped", "3 to 1, skipped"],
)
def test_an_optimizer_that_has_made_no_step_goes_on_at_another_stage(
    engine, tmp_path: Path, monkeypatch, stage: int, to: int, compute: str, gates: GateSection
):
    """A learner that ended before its first checkpoint after step 0, or had all steps until then skipped by a gate."""

    def here(source: Path, target: Path, *_: object) -> None:
        with monkeypatch.context() as patch, deepspeed_classes():
            patch.setenv(DATA_ONLY, "1")
            universal_files.convert(source, target)

    monkeypatch.setattr(universal, "_convert", here)
    straight = engine(zero_stage=stage, compute_dtype=compute, gates=gates)
    if gates is SKIPPED:
        assert straight.train_step(make_batch([0, 1])).skipped_groups == (0, 1)
    made = store(tmp_path, layout_hash=straight.layout.hash)
    made.save(straight, {})
    resumed = engine(zero_stage=to, compute_dtype=compute)
    assert made.load_newest(resumed) == {}
    straight._updater._gates = OPEN
    for k in (1, 2):
        expected, output = (e.train_step(make_batch([2 * k, 2 * k + 1])) for e in (straight, resumed))
        assert output.loss == pytest.approx(expected.loss, abs=1e-4)
        assert output.grad_norm == pytest.approx(expected.grad_norm, rel=1e-2)


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
