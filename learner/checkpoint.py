"""Checkpoints of a run: written aside, made durable, renamed, then marked complete.

Invariant: a checkpoint is either complete (its marker lists every file with size and digest) or is not seen at all;
whatever moment a crash comes, the newest complete one still loads. One that belongs to another run, model or number
of ranks, or whose files changed since, is refused by name. Held by tests/unit/learner/test_checkpoint.py.

    checkpoints/step-00000020/   model and optimizer (DeepSpeed), engine.json, client.json, rng-*.json
                    COMPLETE.json   the marker, written last
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import structlog
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from anabranch.schemas.errors import CheckpointError
from anabranch.schemas.layout import Layout
from anabranch.transport.files import sync_directory, write_atomically

MARKER = "COMPLETE.json"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?\Z")
_READ_BYTES = 2**22


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


class Marker(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    format: str = Field("anabranch.checkpoint/1", pattern=r"^anabranch\.checkpoint/1$")
    run: str
    step: int
    layout_hash: str
    files: dict[str, tuple[int, str]] = Field(description="path inside the checkpoint -> bytes, xxh3-128")


class CheckpointStore:
    """The checkpoints of run `run` in `directory`; `keep` complete ones are retained. Only rank 0 has one. `heartbeat` is
    called while files are written, often: a large checkpoint takes minutes."""

    def __init__(
        self,
        directory: Path,
        *,
        run: str,
        layout_hash: str,
        keep: int,
        heartbeat: Callable[[], object] = lambda: None,
    ) -> None:
        self._directory, self._run, self._layout_hash, self._keep = directory, run, layout_hash, keep
        self._heartbeat = heartbeat
        self._log = structlog.get_logger()

    def save(self, engine: Checkpointed, client_state: dict[str, Any]) -> Path:
        """Save `engine` and `client_state` (anything JSON can carry); durable when it returns.

        Raises:
            OSError: the disk is full or not writable. The earlier checkpoints are untouched.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        for leftover in self._directory.glob(".*.tmp"):
            shutil.rmtree(leftover)
        place = self._free_place(engine.step)
        aside = self._directory / f".{place.name}.tmp"
        engine.save(aside, client_state)
        files = {str(p.relative_to(aside)): self._secure(p) for p in _files(aside)}
        for folder in [aside, *(p for p in aside.rglob("*") if p.is_dir())]:
            sync_directory(folder)
        os.rename(aside, place)
        sync_directory(self._directory)
        marker = Marker(run=self._run, step=engine.step, layout_hash=self._layout_hash, files=files)
        write_atomically(place / MARKER, marker.model_dump_json(indent=1).encode())
        self._retire()
        return place

    def load_newest(self, engine: Checkpointed) -> dict[str, Any] | None:
        """Load the newest complete checkpoint into `engine`; returns its client state, None if there is none.

        Raises:
            CheckpointError: it is of another run or model, was written by another number of ranks, or a file in it is
                missing or damaged. An older one is not taken instead: entries that went into the newer one are
                acknowledged and would be lost without a word.
        """
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
        for name, expected in marker.files.items():
            path = place / name
            if not path.is_file() or _size_and_digest(path) != expected:
                raise CheckpointError(
                    f"{path} is {'damaged' if path.is_file() else 'missing'}; to go back to an older checkpoint: "
                    f"anabranch checkpoints --give-up-above {marker.step - 1}"
                )
        return engine.load(place)

    def export(self, engine: Checkpointed, directory: Path | None = None) -> Path:
        """Write the present weights as a Hugging Face folder (default: `model` beside the checkpoints)."""
        from anabranch.learner.weights import export_hf

        target = directory or self._directory.parent / "model"
        aside = target.with_name(f".{target.name}.tmp")
        shutil.rmtree(aside, ignore_errors=True)
        export_hf(aside, engine.layout, engine.state_bits(), source=engine.model_dir)
        for path in _files(aside):
            self._secure(path)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(aside, target)
        sync_directory(target.parent)
        return target

    def _secure(self, path: Path) -> tuple[int, str]:
        """`_size_and_digest` of a file that is on the disk when this returns."""
        found = _size_and_digest(path, heartbeat=self._heartbeat)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        self._heartbeat()
        return found

    def _free_place(self, step: int) -> Path:
        """A new name for this step: one that is there already (unmarked, or of an abandoned line) stays as it is until
        the new one is complete."""
        names = [f"step-{step:08d}", *(f"step-{step:08d}.{k}" for k in range(1, 1000))]
        return next(self._directory / name for name in names if not (self._directory / name).exists())

    def _retire(self) -> None:
        kept = set(complete_checkpoints(self._directory)[-self._keep :])
        for place in _places(self._directory):
            if place not in kept:
                (place / MARKER).unlink(missing_ok=True)  # first, so that half a checkpoint is never a complete one
                shutil.rmtree(place)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Folders of the complete checkpoints in `directory`, oldest first."""
    return [p for p in _places(directory) if (p / MARKER).is_file()]


def read_marker(place: Path) -> Marker:
    """Raises CheckpointError if the marker of the checkpoint `place` cannot be read."""
    try:
        return Marker.model_validate_json((place / MARKER).read_bytes())
    except ValidationError as error:
        raise CheckpointError(f"{place / MARKER} is not a checkpoint marker this version reads") from error


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


def _places(directory: Path) -> list[Path]:
    """Everything that has a checkpoint's name, oldest first."""
    found = [(match, p) for p in directory.glob("step-*") if (match := _NAME.match(p.name))]
    return [p for _, p in sorted(found, key=lambda x: (int(x[0][1]), int(x[0][2] or 0)))]


def _files(directory: Path) -> list[Path]:
    return sorted(p for p in directory.rglob("*") if p.is_file())


def _size_and_digest(path: Path, *, heartbeat: Callable[[], object] = lambda: None) -> tuple[int, str]:
    """Bytes and xxh3-128 of a file; `heartbeat` is called for every block."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            size += len(block)
            heartbeat()
    return size, digest.hexdigest()
