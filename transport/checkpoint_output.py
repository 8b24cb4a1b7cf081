"""The empty form of a checkpoint: all of its files as they will be, with the tensors still to be written.

Invariant: headers, metadata, shards and bytes between tensors are those of the checkpoint that the form is taken from;
other files of its folder are copied, except those that hold weights as well, which would be the old ones. Without room
on the disk for all of it nothing is made; with it, room is taken at once, so that a full disk shows before the work is done.
Held by tests/unit/transport/test_checkpoint_output.py.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from anabranch.schemas.errors import TemporaryError
from anabranch.schemas.layout import Layout
from anabranch.transport.checkpoint_files import (
    CheckpointFiles,
    StoredTensor,
    single_file_header,
)
from anabranch.transport.files import sync_directory

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")
_COPIED_BYTES = 16 * 2**20


def copy_form(files: CheckpointFiles, work: Path) -> list[str]:
    """Make at `work` (a file, or an empty folder if `files` is one) what `files` is, without the tensors.

    Returns the names of files that were left out because they hold weights of another kind.

    Raises:
        TemporaryError: the disk has no room for it.
        OSError: something cannot be read or written.
    """
    _refuse_without_room(work.parent, sum(file.stat().st_size for file in files.files))
    stored = [place for places in files.places.values() for place in places]
    for file in files.files:
        target = work / file.name if files.is_folder else work
        _copy_around(file, target, sorted((t for t in stored if t.file == file), key=lambda t: t.offset_bytes))
        shutil.copymode(file, target)
    return _copy_others(files, work) if files.is_folder else []


def single_file_form(layout: Layout, work: Path) -> None:
    """Make at `work` one safetensors file with the tensors of `layout`, still to be written.

    Raises:
        TemporaryError: the disk has no room for it.
        OSError: it cannot be written.
    """
    header = single_file_header(layout)
    _refuse_without_room(work.parent, len(header) + layout.payload_bytes)
    with work.open("r+b" if work.exists() else "xb") as file:
        file.write(header)
        take_room(file.fileno(), len(header) + layout.payload_bytes)


def take_room(fd: int, size_bytes: int) -> None:
    """Make the file `size_bytes` long and reserve them on the disk. Raises OSError if there is no such room."""
    try:
        if size_bytes:
            os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, size_bytes)


def _refuse_without_room(folder: Path, size_bytes: int) -> None:
    """Before a byte is written: where a file system cannot reserve room, the library would write zeros until it is full."""
    disk = os.statvfs(folder)
    free = disk.f_frsize * (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail)
    if disk.f_blocks and free < size_bytes:  # some file systems of the network tell nothing: no blocks at all
        raise TemporaryError(f"there is no room in {folder}: {size_bytes:,} bytes are needed, {free:,} are free")


def _copy_around(source: Path, target: Path, tensors: list[StoredTensor]) -> None:
    """Copy everything that is no tensor: the header, and gaps if there are any."""
    with source.open("rb") as old, target.open("r+b" if target.exists() else "xb") as new:
        size = os.fstat(old.fileno()).st_size
        take_room(new.fileno(), size)
        at = 0
        for start, stop in [*((t.offset_bytes, t.offset_bytes + t.size_bytes) for t in tensors), (size, size)]:
            while at < start:
                part = os.pread(old.fileno(), min(start - at, _COPIED_BYTES), at)
                if not part:
                    return  # cut short meanwhile: reading its tensors will say so
                os.pwrite(new.fileno(), part, at)
                at += len(part)
            at = max(at, stop)


def _copy_others(files: CheckpointFiles, work: Path) -> list[str]:
    left_out = []
    for folder, inner, names in os.walk(files.path):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        place = work / Path(folder).relative_to(files.path)
        place.mkdir(exist_ok=True)
        for name in sorted(names):
            source = Path(folder) / name
            if name.startswith(".") or source in files.files or not source.is_file():
                continue
            if name.endswith(WEIGHT_SUFFIXES):
                left_out.append(str(source.relative_to(files.path)))
                continue
            shutil.copy(source, place / name)
            with (place / name).open("rb") as copied:
                os.fsync(copied.fileno())
        sync_directory(place)
    return left_out
