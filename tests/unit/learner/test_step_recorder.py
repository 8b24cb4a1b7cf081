"""Records on disk: whole ones, once all ranks have done their part; and disks that do not want them."""

import errno
import threading
import time
from pathlib import Path

import pytest

from anabranch.consumers.step_records import read_facts, read_rollouts, recorded_steps
from anabranch.learner import step_recorder
from anabranch.learner.rollout_trace import RolloutTrace
from anabranch.learner.step import UpdateFacts
from anabranch.learner.step_observer import SeenUpdate
from anabranch.learner.step_recorder import RecordedStep, StepRecorder
from anabranch.schemas.config import RunConfig, load_config
from anabranch.schemas.step_record import UpdateResult
from anabranch.transport.files import write_atomically
from tests.record_orders import order_of
from tests.unit.learner.conftest import make_batch

BATCH = make_batch([3], samples=2)


def config(root: Path, *more: str) -> RunConfig:
    return load_config("", overrides=["run.name=r", f"run.dir={root}", *more])


def step(version: int, *rows: int) -> RecordedStep:
    order = order_of(BATCH, version=version)
    traces = []
    for row in rows:
        logprob = -BATCH.behaviour[row, : BATCH.lengths[row]]
        traces.append(RolloutTrace(row, 1.0, 0.5, 1.0, 1.0, 1.0, 0.0, logprob, None, logprob, None, logprob > 0))
    return RecordedStep(
        order,
        [UpdateFacts((3,), (), 1.0)],
        [SeenUpdate(traces, UpdateResult.of(0.5, 1.0, applied=True), ())],
        1e-4,
        1,
        0.1,
    )


def wait_for(condition, what: str, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.01)


def test_what_was_handed_over_is_there_after_close(tmp_path: Path):
    made = config(tmp_path)
    recorder = StepRecorder(made)
    for version in range(3):
        recorder.put(step(version, 0, 1))
    recorder.close()
    places = recorded_steps(made.run.directory)
    assert [(p.epoch, p.step) for p in places] == [(1, 1), (1, 2), (1, 3)]
    facts = read_facts(places[1])
    assert facts.version_before == 1
    assert read_rollouts(places[1], facts)["sample_index"].to_pylist() == [0, 1]
    assert recorder.look() == []
    assert not list(made.run.directory.rglob("*.tmp"))


def test_no_record_counts_before_every_rank_has_written(tmp_path: Path):
    made = config(tmp_path, "learner.world_size=2")
    first, second = StepRecorder(made, 0), StepRecorder(made, 1)
    first.put(step(0, 0))
    folder = made.run.directory / "steps/epoch=1/000001"
    wait_for((folder / "rank-0.parquet").is_file, "rank 0's file")
    time.sleep(3 * step_recorder.POLL_S)
    assert recorded_steps(made.run.directory) == []
    second.put(step(0, 1))
    wait_for(lambda: recorded_steps(made.run.directory), "the facts")
    (place,) = recorded_steps(made.run.directory)
    assert read_rollouts(place, read_facts(place)).num_rows == 2
    first.close()
    second.close()


def test_a_rank_that_never_writes_is_told_of_and_the_next_step_is_recorded(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(step_recorder, "OTHERS_S", 0.2)
    made = config(tmp_path, "learner.world_size=2")
    first, second = StepRecorder(made, 0), StepRecorder(made, 1)
    first.put(step(0, 0))
    notes: list = []
    wait_for(lambda: notes.extend(first.look()) or notes, "the note")
    assert notes[0][0] == "steps not recorded"
    assert "ranks [1]" in notes[0][1]["error"]
    second.put(step(1, 1))
    wait_for((made.run.directory / "steps/epoch=1/000002/rank-1.parquet").is_file, "rank 1's file")
    first.put(step(1, 0))
    first.close()
    second.close()
    assert [p.step for p in recorded_steps(made.run.directory)] == [2]
    assert first.look() == [("steps recorded again", {"lost": 1})]


def test_a_full_disk_is_told_once_and_recording_goes_on_when_there_is_room(tmp_path: Path, monkeypatch):
    full = threading.Event()
    full.set()

    def write(path: Path, content: bytes, **kwargs: int) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_atomically(path, content, **kwargs)

    monkeypatch.setattr(step_recorder, "write_atomically", write)
    made = config(tmp_path)
    recorder = StepRecorder(made)
    recorder.put(step(0, 0, 1))
    recorder.put(step(1, 0, 1))
    wait_for(lambda: recorder._lost == 2, "two lost records")
    full.clear()
    recorder.put(step(2, 0, 1))
    recorder.close()
    told = recorder.look()
    assert [what for what, _ in told] == ["steps not recorded", "steps recorded again"]
    assert "No space left" in told[0][1]["error"]
    assert told[1][1] == {"lost": 2}
    assert [p.step for p in recorded_steps(made.run.directory)] == [3]


def test_a_disk_that_is_too_slow_costs_records_and_not_the_run(tmp_path: Path, monkeypatch):
    let_go = threading.Event()

    def write(path: Path, content: bytes, **kwargs: int) -> None:
        assert let_go.wait(30)
        write_atomically(path, content, **kwargs)

    monkeypatch.setattr(step_recorder, "write_atomically", write)
    monkeypatch.setattr(step_recorder, "PATIENCE_S", 0.05)
    recorder = StepRecorder(config(tmp_path))
    started = time.monotonic()
    for version in range(8):
        recorder.put(step(version, 0, 1))
    assert time.monotonic() - started < 5
    let_go.set()
    recorder.close()
    assert recorder.look()[0][0] == "steps not recorded"
    steps = [p.step for p in recorded_steps(tmp_path / "r")]
    assert steps[:2] == [1, 2]
    assert len(steps) < 8


def test_whatever_goes_wrong_with_a_record_the_next_one_is_written(tmp_path: Path, monkeypatch):
    """No error of the system alone: a driver, say, that does not tell of its GPU."""
    real, broken = step_recorder.machine_facts, threading.Event()
    broken.set()

    def facts(*args, **kwargs):
        if broken.is_set():
            raise RuntimeError("CUDA error: out of memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(step_recorder, "machine_facts", facts)
    made = config(tmp_path)
    recorder = StepRecorder(made)
    recorder.put(step(0, 0, 1))
    notes: list = []
    wait_for(lambda: notes.extend(recorder.look()) or notes, "the note")
    assert notes[0][0] == "steps not recorded"
    assert "CUDA error" in notes[0][1]["error"]
    broken.clear()
    recorder.put(step(1, 0, 1))
    recorder.close()
    assert [p.step for p in recorded_steps(made.run.directory)] == [2]
    assert recorder.look() == [("steps recorded again", {"lost": 1})]


def test_a_folder_that_cannot_be_looked_into_costs_its_record_alone(tmp_path: Path, monkeypatch):
    """What a network file system answers when the files of the other ranks are looked for."""
    made = config(tmp_path, "learner.world_size=2")
    real = Path.is_file

    def is_file(path: Path) -> bool:
        if path.parent.name == "000001" and path.name == "rank-1.parquet":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path)

    monkeypatch.setattr(Path, "is_file", is_file)
    first, second = StepRecorder(made, 0), StepRecorder(made, 1)
    for version in range(2):
        second.put(step(version, 1))
        first.put(step(version, 0))
    first.close()
    second.close()
    assert [p.step for p in recorded_steps(made.run.directory)] == [2]
    assert "Input/output error" in first.look()[0][1]["error"]


def test_a_run_directory_that_takes_nothing_ends_no_run(tmp_path: Path):
    (tmp_path / "r").write_text("a file where the run directory should be")
    recorder = StepRecorder(config(tmp_path))
    for version in range(3):
        recorder.put(step(version, 0, 1))
    recorder.close()
    assert [what for what, _ in recorder.look()] == ["steps not recorded"]


@pytest.mark.parametrize("tokens", [True, False])
def test_lists_are_written_as_configured(tmp_path: Path, tokens: bool):
    made = config(tmp_path, f"recorder.tokens={str(tokens).lower()}")
    recorder = StepRecorder(made)
    recorder.put(step(0, 0, 1))
    recorder.close()
    (place,) = recorded_steps(made.run.directory)
    facts = read_facts(place)
    assert facts.tokens is tokens
    assert (read_rollouts(place, facts)["logprob"].null_count == 0) is tokens
