"""A learner that does nothing but checkpoints, as a process of its own, for tests that kill it: what `tests.zygote` forks. The
store and the writer are the real ones, the engine's state is one file that tells its step."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

from anabranch.learner import universal
from anabranch.learner.checkpoint_folder import complete_checkpoints
from anabranch.learner.checkpoint_writer import CheckpointWriter
from tests.checkpoint_stores import Counter, store
from tests.process.weight_actors import PLACES, die_after, say

FILES = ("learner/checkpoint.py", "checkpoint_folder.py", "checkpoint_writer.py", "retention.py", "transport/files.py")
PLACES.update(
    {
        "all": (FILES, ()),
        "finishing": (FILES, ("finish", "_finish", "seal", "write_atomically", "sync_directory", "size_and_digest")),
        "retiring": (FILES, ("_retire", "kept_checkpoints", "places", "complete_checkpoints")),
        "converting": (("learner/universal.py", "conversion_lock.py", *FILES), ()),
    }
)


def warm_up() -> None:
    """Imported is enough."""
    assert threading.active_count() == 1


class Engine(Counter):
    def save(self, directory: Path, client_state: dict[str, Any]) -> None:
        super().save(directory, client_state)
        for k in range(3):
            (directory / "deep" / f"shard-{k}.pt").write_bytes(bytes([k, self.step % 256]) * 5000)


def checkpoints(folder: str, log: str, die: int, where: str, count: int = 6) -> None:
    """Resume, then so many checkpoints more, each begun as soon as the one before is durable. Every one that is told to be
    durable is said in the log."""
    engine, made = Engine(), store(Path(folder), keep=2, keep_every=4)
    die_after(die, where, log)
    state = made.load_newest(engine)
    if state is not None:
        assert state == {"at": engine.step}
    say(log, event="resumed", step=engine.step)
    writer = CheckpointWriter(made, background=True)
    for _ in range(count):
        engine.step += 1
        writer.begin(engine, {"at": engine.step})
        if (done := writer.wait()) is not None:
            say(log, event="durable", step=done.step)
    say(log, event="ended", step=engine.step)


def conversion(folder: str, log: str, die: int) -> None:
    """Convert the newest checkpoint, by copying it: what DeepSpeed does takes seconds, and is aside the same."""
    universal._convert = copied
    (*_, newest) = complete_checkpoints(Path(folder) / "check points")
    if die:
        die_after(die, "converting", log)
    universal.make_universal(newest)
    say(log, event="converted")


def copied(source: Path, target: Path, *_: object) -> None:
    shutil.copytree(source.with_name("deep"), target)
    (target.parent / "latest_universal").touch()
