"""One checkpoint at a time, durable in the background; each is told once, or why it failed."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anabranch.learner import checkpoint_writer
from anabranch.learner.checkpoint import CheckpointStore, Unfinished
from anabranch.learner.checkpoint_folder import Marker
from anabranch.learner.checkpoint_writer import CheckpointWriter, WriterState
from anabranch.schemas.errors import EXIT_TEMPORARY, AnabranchError, DeadlineError, TemporaryError
from tests.checkpoint_stores import Counter, store


class Slow(CheckpointStore):
    """`finish` waits to be let go, and fails with `error`, if there is one."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, run="run", layout_hash=Counter.layout.hash, keep=2)
        self.go, self.error = threading.Event(), None

    def finish(self, unfinished: Unfinished, *, progress: Callable[[], object] = lambda: None) -> Marker:
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error
        return super().finish(unfinished, progress=progress)


@pytest.fixture
def slow(tmp_path: Path):
    made = Slow(tmp_path)
    yield made
    made.go.set()


def test_it_is_told_once_when_it_is_durable_and_not_before(slow: Slow):
    writer = CheckpointWriter(slow, background=True)
    writer.begin(Counter(3), {"n": 3})
    assert writer.state is WriterState.FINISHING
    assert writer.poll() is None
    assert slow.load_newest(Counter()) is None
    slow.go.set()
    done = writer.wait()
    assert done is not None
    assert (done.step, done.client_state, done.bytes) == (3, {"n": 3}, 9)
    assert slow.load_newest(Counter()) == {"n": 3}
    assert writer.poll() is None
    assert writer.wait() is None
    assert writer.state is WriterState.IDLE


def test_what_the_engine_does_meanwhile_is_not_in_it(slow: Slow):
    engine, writer = Counter(3), CheckpointWriter(slow, background=True)
    writer.begin(engine, {})
    engine.step = 4
    slow.go.set()
    writer.wait()
    loaded = Counter()
    slow.load_newest(loaded)
    assert loaded.step == 3


def test_another_one_has_to_wait(slow: Slow):
    writer = CheckpointWriter(slow, background=True)
    writer.begin(Counter(3), {})
    with pytest.raises(AnabranchError, match="checkpoint of step 3 is finishing; wait for it first"):
        writer.begin(Counter(4), {})
    heard: list[str] = []

    def waiting(what: str) -> None:
        heard.append(what)
        slow.go.set()

    assert writer.wait(waiting) is not None
    assert heard[0] == "the checkpoint of step 3 to be on the disk"
    writer.begin(Counter(4), {})
    assert writer.wait().step == 4  # type: ignore[union-attr]


def test_in_the_foreground_it_is_durable_when_begin_returns(tmp_path: Path):
    beats: list[int] = []
    writer = CheckpointWriter(store(tmp_path), background=False, heartbeat=lambda: beats.append(1))
    writer.begin(Counter(3), {"n": 3})
    assert store(tmp_path).load_newest(Counter()) == {"n": 3}
    assert writer.poll().step == 3  # type: ignore[union-attr]


def test_a_full_disk_in_the_background_is_named_to_whoever_asks(slow: Slow):
    writer = CheckpointWriter(slow, background=True)
    slow.error = OSError(errno.ENOSPC, "No space left on device", "/runs/x/COMPLETE.json")
    slow.go.set()
    writer.begin(Counter(3), {})
    with pytest.raises(
        TemporaryError, match=r"checkpoint of step 3 cannot be written .*COMPLETE.json.*from the checkpoint before"
    ) as e:
        writer.wait()
    assert e.value.exit_code == EXIT_TEMPORARY
    assert writer.state is WriterState.FAILED
    for ask in (writer.poll, writer.wait):
        with pytest.raises(TemporaryError):
            ask()
    with pytest.raises(AnabranchError, match="is failed"):
        writer.begin(Counter(4), {})


def test_a_full_disk_while_the_files_are_written(slow: Slow):
    class Full(Counter):
        def save(self, directory: Path, client_state: dict[str, Any]) -> None:
            super().save(directory, client_state)
            raise OSError(errno.ENOSPC, "No space left on device")

    writer = CheckpointWriter(slow, background=True)
    with pytest.raises(TemporaryError, match="checkpoint of step 3 cannot be written"):
        writer.begin(Full(3), {})
    assert writer.state is WriterState.FAILED


def test_a_disk_that_does_not_get_on_is_named_at_a_deadline(slow: Slow, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "STALL_S", 0.05)
    beats: list[int] = []
    writer = CheckpointWriter(slow, background=True, heartbeat=lambda: beats.append(1))
    writer.begin(Counter(3), {})
    with pytest.raises(DeadlineError, match=r"the checkpoint of step 3 to be on the disk.*the disk does not get on"):
        writer.wait()
    assert beats


def test_a_learner_that_ends_gives_the_last_one_its_time_but_not_for_ever(slow: Slow):
    writer = CheckpointWriter(slow, background=True)
    writer.close(deadline_s=30)  # nothing to wait for
    writer.begin(Counter(3), {})
    writer.close(deadline_s=0.01)
    assert writer.state is WriterState.FINISHING
    threading.Timer(0.01, slow.go.set).start()
    writer.close(deadline_s=30)
    assert slow.load_newest(Counter()) == {}
