"""Checkpoints of a run: begun while the engine stands still, finished while it may go on.

Invariant: a checkpoint is either complete (its marker lists every file with size and digest) or is not seen at all;
whatever moment a crash comes, the newest complete one still loads. One that belongs to another run, model or number
format, or whose files changed since, is refused by name. Held by tests/unit/learner/test_checkpoint.py,
tests/unit/learner/test_foreign_checkpoints.py and tests/process/test_checkpoint_kills.py.

    checkpoints/step-00000020/   model and optimizer (DeepSpeed), engine.json, client.json, rng-*.json
                    COMPLETE.json   the marker, written last
    checkpoints/universal-step-00000020/   the same for any number of ranks, made when it is wanted (see universal.py)
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import structlog

from anabranch.learner.beating import beating, file_deadline_s
from anabranch.learner.checkpoint_folder import (
    Marker,
    complete_checkpoints,
    files_in,
    places,
    read_marker,
    remove,
    seal,
    step_of,
    verify,
)
from anabranch.learner.conversion_lock import not_converting
from anabranch.learner.retention import UNIVERSAL, kept_checkpoints, source_of
from anabranch.schemas.errors import CheckpointError, TemporaryError
from anabranch.schemas.layout import Layout
from anabranch.transport.files import sync_directory

# Every byte of the weights, as published, stands for about as many of masters and two moments (16 bits -> 3 · 32).
STATE_FACTOR = 8


class Checkpointed(Protocol):
    """What the store needs of an engine: `LearnerEngine`, or rank 0's view of several."""

    @property
    def step(self) -> int: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def model_dir(self) -> Path: ...
    def save(self, directory: Path, client_state: dict[str, Any]) -> None: ...
    def load(self, directory: Path) -> dict[str, Any]: ...
    def state_bits(self) -> dict[str, np.ndarray[Any, Any]]: ...


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A checkpoint whose files are written and may still be lost."""

    aside: Path
    place: Path
    marker: Marker


class CheckpointStore:
    """The checkpoints of run `run` in `directory`; the `keep` newest complete ones are retained, and those of every
    `keep_every` steps (0: none). Only rank 0 has one. `heartbeat` is called while files are written, often: a large
    checkpoint takes minutes."""

    def __init__(
        self,
        directory: Path,
        *,
        run: str,
        layout_hash: str,
        keep: int,
        keep_every: int = 0,
        heartbeat: Callable[[], object] = lambda: None,
    ) -> None:
        self._directory, self._run, self._layout_hash = directory, run, layout_hash
        self._keep, self._keep_every, self._heartbeat = keep, keep_every, heartbeat
        self._log = structlog.get_logger()

    def save(self, engine: Checkpointed, client_state: dict[str, Any]) -> Path:
        """Save `engine` and `client_state` (anything JSON can carry); durable when it returns.

        Raises:
            OSError: the disk is full or not writable. The earlier checkpoints are untouched.
        """
        unfinished = self.begin(engine, client_state)
        self.finish(unfinished, progress=self._heartbeat)
        return unfinished.place

    def begin(self, engine: Checkpointed, client_state: dict[str, Any]) -> Unfinished:
        """Write the files of `save`: after it the engine may go on, while `finish` makes them durable. One at a time.

        Raises OSError or TemporaryError as `save`.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        for leftover in self._directory.glob(".*.tmp"):
            with not_converting(source_of(leftover)) as nobody:
                if nobody:
                    remove(leftover)
        place = self._free_place(engine.step)
        aside = self._directory / f".{place.name}.tmp"
        try:
            with self._beating(engine, "writing a checkpoint"):
                engine.save(aside, client_state)
        except (OSError, TemporaryError):
            with contextlib.suppress(OSError):  # what is full has the room again that the next start needs
                remove(aside)
            raise
        marker = Marker(run=self._run, step=engine.step, layout_hash=self._layout_hash, files={})
        return Unfinished(aside, place, marker)

    def finish(self, unfinished: Unfinished, *, progress: Callable[[], object] = lambda: None) -> Marker:
        """Make it durable, mark it, and let older ones go; in any thread. `progress` is called for every block of a file.

        Raises OSError: it is not complete, and the earlier checkpoints are untouched.
        """
        try:
            marker = seal(unfinished.aside, unfinished.place, unfinished.marker, progress=progress)
        except OSError:
            with contextlib.suppress(OSError):  # as in `begin`
                remove(unfinished.aside)
                remove(unfinished.place)
            raise
        self._retire()
        return marker

    def load_newest(self, engine: Checkpointed) -> dict[str, Any] | None:
        """Load the newest complete checkpoint into `engine`; returns its client state, None if there is none.

        Raises:
            CheckpointError: it is of another run or model, was written by ranks or with dtypes from which `engine` cannot
                go on, or a file in it is missing or damaged. An older one is not taken instead: entries that went into the
                newer one are acknowledged and would be lost without a word.
            TemporaryError: nobody can tell what the folder holds (a link to a disk that is not mounted, for example).
        """
        if os.path.lexists(self._directory):
            try:
                os.listdir(self._directory)
            except OSError as error:
                raise TemporaryError(
                    f"the folder of the checkpoints cannot be listed ({error}): mount or mend it, or remove what is in its place; "
                    "without it the run would begin again at version 0"
                ) from error
        complete = complete_checkpoints(self._directory)
        if not complete:
            return None
        place = complete[-1]
        marker = read_marker(place)
        if marker.run != self._run:
            raise CheckpointError(f"{place} belongs to run {marker.run!r}, not {self._run!r}")
        if marker.layout_hash != self._layout_hash:
            raise CheckpointError(
                f"{place} holds another model: its layout is {marker.layout_hash}, not {self._layout_hash}"
            )
        hint = f"; to go back to an older checkpoint: anabranch checkpoints --give-up-above {marker.step - 1}"
        if marker.step != step_of(place):
            raise CheckpointError(f"{place} holds step {marker.step}: it was renamed; give it its name back")
        verify(place, marker, hint=hint, progress=self._heartbeat)
        # Twice: it may have to be converted for another number of ranks.
        with beating(self._heartbeat, "reading a checkpoint", deadline_s=2 * file_deadline_s(marker.bytes)):
            return engine.load(place)

    def export(self, engine: Checkpointed, directory: Path | None = None) -> Path:
        """Write the present weights as a Hugging Face folder (default: `model` beside the checkpoints)."""
        from anabranch.learner.weights import export_hf

        target = directory or self._directory.parent / "model"
        aside = target.with_name(f".{target.name}.tmp")
        shutil.rmtree(aside, ignore_errors=True)
        with self._beating(engine, "exporting the model"):
            export_hf(aside, engine.layout, engine.state_bits(), source=engine.model_dir)
        for path in files_in(aside):
            with path.open("rb") as file:
                os.fsync(file.fileno())
            self._heartbeat()
        remove(target)
        os.rename(aside, target)
        sync_directory(target.parent)
        return target

    def _beating(self, engine: Checkpointed, what: str) -> Any:
        deadline_s = file_deadline_s(STATE_FACTOR * engine.layout.payload_bytes)
        return beating(self._heartbeat, what, deadline_s=deadline_s)

    def _free_place(self, step: int) -> Path:
        """A new name for this step: one that is there already (unmarked, or of an abandoned line) stays as it is until
        the new one is complete."""
        names = [f"step-{step:08d}", *(f"step-{step:08d}.{k}" for k in range(1, 1000))]
        return next(self._directory / name for name in names if not os.path.lexists(self._directory / name))

    def _retire(self) -> None:
        kept = kept_checkpoints(complete_checkpoints(self._directory), keep=self._keep, keep_every=self._keep_every)
        gone = [p for p in places(self._directory) if p not in kept]
        gone += [p for p in self._directory.glob(f"{UNIVERSAL}*") if source_of(p) not in kept]
        for place in gone:
            try:
                with not_converting(source_of(place)) as nobody:
                    if nobody:  # else it goes with the next
                        remove(place)
            except OSError as error:  # the new one is complete all the same, and the others can go
                self._log.warning("an old checkpoint cannot be removed", place=str(place), error=str(error))


def give_up_above(directory: Path, step: int) -> list[tuple[Path, Path]]:
    """Rename the complete checkpoints of later steps than `step`, so that the learner resumes from an older one; returns
    (checkpoint, what it is now). Call it while no learner runs.

    The entries that went into them are acknowledged; the learner has those group indices sampled again.

    Raises:
        CheckpointError: none would be left. Nothing is renamed.
    """
    complete = complete_checkpoints(directory)
    later = [p for p in complete if read_marker(p).step > step]
    if len(later) == len(complete):
        raise CheckpointError(f"{directory} has no complete checkpoint at or below step {step}")
    moved = []
    for place in reversed(later):  # newest first: killed in between, the learner still finds what it would have found
        names = (place.with_name(f"given-up-{place.name}.{k}") for k in range(1000))
        aside = next(name for name in names if not name.exists())
        os.rename(place, aside)
        moved.append((place, aside))
    sync_directory(directory)
    return moved
