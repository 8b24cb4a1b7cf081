"""Checkpoints for any number of ranks: DeepSpeed's universal checkpoint, kept beside the one it was made from.

Invariant: a converted checkpoint is complete or not there (as every checkpoint), is made once, and only counts for the very
checkpoint it was made from. Nothing in it is unpickled: DeepSpeed's own reading of it, with the full unpickler, is made to
read tensors and plain containers only. Held by tests/unit/learner/test_universal.py and tests/e2e/test_world_size.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from anabranch.learner.beating import file_deadline_s
from anabranch.learner.checkpoint_folder import MARKER, Marker, read_marker, remove, seal, size_and_digest, verify
from anabranch.learner.conversion_lock import converting
from anabranch.learner.deepspeed_files import deepspeed_classes
from anabranch.learner.retention import UNIVERSAL
from anabranch.schemas.errors import CheckpointError, DeadlineError, TemporaryError
from anabranch.transport.retry import wait_until
from anabranch.transport.runtime import bound_to_parent

DEEPSPEED_FOLDER = "deepspeed"
SOURCE_FILE = "source.json"
DATA_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_POLL_S = 0.1


def universal_folder(place: Path) -> Path:
    """Where `make_universal` puts it."""
    return place.with_name(f"{UNIVERSAL}{place.name}")


def make_universal(place: Path, *, heartbeat: Callable[[], object] = lambda: None) -> Path:
    """The complete checkpoint `place` for any number of ranks: converted now, unless that was done before. It needs as much
    room as `place`, and twice that while it is made. If another process converts it, that is waited for. `heartbeat` is called
    meanwhile.

    Raises:
        CheckpointError: DeepSpeed cannot convert it, or what was converted is damaged.
        TemporaryError: the disk is full; DeadlineError: it takes too long.
    """
    universal = universal_folder(place)
    marker = read_marker(place)
    try:
        if not is_universal(place):
            with converting(place, deadline_s=_deadline_s(marker), heartbeat=heartbeat):
                if not is_universal(place):
                    _make(place, universal, marker, heartbeat)
                    return universal
    except DeadlineError:  # an OSError too
        raise
    except OSError as error:
        raise TemporaryError(f"{universal} cannot be written: {error}; make room, then start again") from error
    verify(universal, read_marker(universal), hint="; remove that folder", progress=heartbeat)
    return universal


def _make(place: Path, universal: Path, marker: Marker, heartbeat: Callable[[], object]) -> None:
    aside = place.with_name(f".{universal.name}.tmp")
    try:
        for leftover in (universal, aside):
            remove(leftover)
        aside.mkdir()
        _convert(place / DEEPSPEED_FOLDER, aside / DEEPSPEED_FOLDER, marker, heartbeat)
        (aside / "latest_universal").unlink()
        (aside / SOURCE_FILE).write_text(json.dumps(_source(place)))
        seal(aside, universal, marker, progress=heartbeat)
    except BaseException:
        if not (universal / MARKER).exists():  # what is full has the room again
            shutil.rmtree(universal, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def is_universal(place: Path) -> bool:
    """Whether it has been made, of this very checkpoint."""
    universal = universal_folder(place)
    try:
        return (universal / MARKER).is_file() and json.loads((universal / SOURCE_FILE).read_bytes()) == _source(place)
    except (FileNotFoundError, ValueError, RecursionError):  # rank 0 removes one of another checkpoint
        return False


def await_universal(place: Path) -> None:
    """What the other ranks do while rank 0 makes it: longer than a collective would wait. Raises DeadlineError."""
    deadline_s = _deadline_s(read_marker(place))
    what = f"rank 0 to convert {place} for another number of ranks"
    wait_until(lambda: is_universal(place), deadline_s=deadline_s, what=what, poll_s=_POLL_S)


def _source(place: Path) -> dict[str, str]:
    return {"marker": size_and_digest(place / MARKER)[1]}


def _deadline_s(marker: Marker) -> float:
    """Read, written twice, read back for the digest."""
    return file_deadline_s(4 * marker.bytes)


@contextlib.contextmanager
def as_universal(engine: Any) -> Iterator[None]:
    """Inside, `engine.load_checkpoint` reads a universal checkpoint, as data."""
    before = os.environ.get(DATA_ONLY)
    os.environ[DATA_ONLY] = "1"
    engine._config.load_universal_checkpoint = True
    try:
        with deepspeed_classes():
            yield
    finally:
        engine._config.load_universal_checkpoint = False
        os.environ.pop(DATA_ONLY)
        if before is not None:
            os.environ[DATA_ONLY] = before


def _convert(source: Path, target: Path, marker: Marker, heartbeat: Callable[[], object]) -> None:
    """In a process of its own: DeepSpeed prints, and leaves memory behind."""
    deadline_s = _deadline_s(marker)
    log = target.with_name("log.txt")
    command = [sys.executable, "-I", "-m", "anabranch.learner.universal_files", str(source), str(target)]
    end = time.monotonic() + deadline_s
    with log.open("wb") as output:
        child = subprocess.Popen(
            bound_to_parent(command), env=os.environ | {DATA_ONLY: "1", "DS_ACCELERATOR": "cpu"},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=output,
        )  # fmt: skip
        try:
            while child.poll() is None:
                heartbeat()
                if time.monotonic() > end:
                    raise DeadlineError.waiting_for(
                        f"{source.parent} to be converted for another number of ranks", deadline_s
                    )
                time.sleep(_POLL_S)
        finally:
            child.kill()
            child.wait()
    if child.returncode:
        said = log.read_text(errors="replace").strip().splitlines()
        free = shutil.disk_usage(target.parent).free
        why = said[-1] if said else f"exit code {child.returncode}"
        if child.returncode < 0:  # out of memory, for example
            why = f"killed by signal {-child.returncode}"
        error = TemporaryError if free < marker.bytes or child.returncode < 0 else CheckpointError
        raise error(
            f"{source.parent} cannot be converted for another number of ranks or stage ({free:,} bytes are free): {why}"
        )
    log.unlink()
