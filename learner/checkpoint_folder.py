"""A folder of files that is complete or not there: written aside, made durable, renamed, then marked.

Invariant: `seal` returns only when every file and the marker that lists them are on the disk; whatever moment a crash
comes, the folder has a marker that tells the truth or none. `verify` refuses by name what changed since. Held by
tests/unit/learner/test_checkpoint.py, tests/unit/learner/test_checkpoint_neighbours.py,
tests/unit/learner/test_foreign_checkpoints.py and tests/process/test_checkpoint_kills.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Self

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from anabranch.schemas.errors import CheckpointError
from anabranch.transport.files import sync_directory, write_atomically

MARKER = "COMPLETE.json"
FORMAT = "anabranch.checkpoint/1"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?\Z")
_READ_BYTES = 2**22
_MARKER_BYTES = 2**24  # of a marker of a hundred thousand files; more is none


class Marker(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    format: str = Field(FORMAT, pattern=rf"^{FORMAT}$")
    run: str
    step: int
    layout_hash: str
    files: dict[str, tuple[int, str]] = Field(description="path inside the checkpoint -> bytes, xxh3-128")

    def describe(self, files: dict[str, tuple[int, str]]) -> Self:
        """This marker, of these files."""
        return self.model_copy(update={"files": files})

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


def seal(aside: Path, place: Path, marker: Marker, *, progress: Callable[[], object] = lambda: None) -> Marker:
    """Make the folder `aside` durable and complete under the name `place`, which must be free; returns its marker.
    `progress` is called for every block of a file.

    Raises OSError: the disk is full, for example. `place` has no marker then.
    """
    files = {}
    for path in files_in(aside):
        files[str(path.relative_to(aside))] = size_and_digest(path, progress=progress)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        progress()
    for folder in [aside, *(p for p in aside.rglob("*") if p.is_dir())]:
        sync_directory(folder)
    os.rename(aside, place)
    sync_directory(place.parent)
    marker = marker.describe(files)
    write_atomically(place / MARKER, marker.model_dump_json(indent=1).encode())
    return marker


def read_marker(place: Path) -> Marker:
    """Raises CheckpointError if the marker of the checkpoint `place` cannot be read."""
    path = place / MARKER
    try:
        with path.open("rb") as file:
            content = file.read(_MARKER_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        return Marker.model_validate_json(content)
    except ValidationError as error:
        if (written := _format(content)) is not None and written != FORMAT:
            raise CheckpointError(
                f"{place} has the format {written!r} and this version reads {FORMAT!r}: it is not a checkpoint marker this "
                "version reads; go on with the version that wrote it"
            ) from error
        raise CheckpointError(
            f"{path} is damaged: it is not a checkpoint marker this version reads; remove it to go back to the checkpoint before"
        ) from error


def verify(place: Path, marker: Marker, *, hint: str = "", progress: Callable[[], object] = lambda: None) -> None:
    """Raises CheckpointError naming the first file that is not as `marker` says; `hint`: what to do. Files of tensors that
    it does not list are refused too: DeepSpeed reads whatever has the right name."""
    for path in place.rglob("*.pt"):
        if str(path.relative_to(place)) not in marker.files:
            raise CheckpointError(f"{path} is no file of this checkpoint{hint}")
    for name, (size, digest) in marker.files.items():
        path = place / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing{hint}")
        if (found := path.stat().st_size) != size:
            raise CheckpointError(f"{path} is damaged: it has {found:,} bytes, not {size:,}{hint}")
        try:
            same = size_and_digest(path, progress=progress) == (size, digest)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}{hint}") from error
        if not same:
            raise CheckpointError(f"{path} is damaged: its {size:,} bytes have another digest{hint}")


def complete_checkpoints(directory: Path) -> list[Path]:
    """Folders of the complete checkpoints in `directory`, oldest first."""
    return [p for p in places(directory) if (p / MARKER).is_file()]


def places(directory: Path) -> list[Path]:
    """Every folder that has a checkpoint's name, oldest first."""
    found = [(match, p) for p in directory.glob("step-*") if (match := _NAME.match(p.name)) and p.is_dir()]
    return [p for _, p in sorted(found, key=lambda x: (int(x[0][1]), int(x[0][2] or 0)))]


def remove(place: Path) -> None:
    """Remove a folder, complete or not. Of a link only the link goes: what it leads to is somebody else's."""
    if place.is_symlink() or not place.is_dir():
        place.unlink(missing_ok=True)
        return
    (place / MARKER).unlink(missing_ok=True)  # first, so that half a checkpoint is never a complete one
    shutil.rmtree(place)


def step_of(place: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.match(place.name)
    assert match is not None
    return int(match[1])


def files_in(directory: Path) -> list[Path]:
    return sorted(p for p in directory.rglob("*") if p.is_file())


def size_and_digest(path: Path, *, progress: Callable[[], object] = lambda: None) -> tuple[int, str]:
    """Bytes and xxh3-128 of a file; `progress` is called for every block."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            size += len(block)
            progress()
    return size, digest.hexdigest()


def _format(content: bytes) -> str | None:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return str(found["format"]) if isinstance(found, dict) and "format" in found else None
