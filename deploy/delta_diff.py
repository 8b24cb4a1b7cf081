"""`anabranch delta diff`: what changes from one checkpoint to another, or a full snapshot of one, as a delta file.

Invariant: applying the file to OLD gives NEW bit for bit; both may be a file or a folder, sharded differently. Held by
tests/unit/deploy/test_delta_diff.py.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from anabranch.deploy.delta_encode import Labels, WrittenDelta, write_delta
from anabranch.deploy.delta_states import StoredState
from anabranch.schemas.errors import DeltaError
from anabranch.transport.aside import refuse_special
from anabranch.transport.checkpoint_files import INDEX_FILE, first_difference, journal_path, scan_checkpoint
from anabranch.transport.checkpoint_io import OpenCheckpoint


def open_checkpoint(path: Path) -> OpenCheckpoint:
    """Open `path` for reading.

    Raises:
        DeltaError: it is no readable checkpoint.
        UsageError: it, or a file of it, is a device, a pipe or a socket.
        OSError: it is not there.
    """
    refuse_pipes(path)
    return OpenCheckpoint(scan_checkpoint(path, refuse=DeltaError), refuse=DeltaError)


def refuse_pipes(path: Path) -> None:
    """Raises UsageError if a file that a scan of the checkpoint at `path` would open is a pipe: opening it never ends."""
    refuse_special(path)
    refuse_special(journal_path(path))
    for name in (INDEX_FILE, "config.json") if path.is_dir() else ():
        refuse_special(path / name)


def diff(old: Path | None, new: Path, out: Path, labels: Labels, *, threads: int) -> WrittenDelta:
    """Write the change from `old` to `new` (`old` None: all of `new`, an anchor) to the delta file `out`.

    Raises:
        DeltaError: one is no checkpoint, or they hold different tensors.
        OSError, UsageError, TemporaryError: a file cannot be read or written.
    """
    with ExitStack() as stack:
        after = StoredState(stack.enter_context(open_checkpoint(new)))
        before = StoredState(stack.enter_context(open_checkpoint(old))) if old else None
        if before:
            difference = first_difference(before.layout, after.layout, here=str(old), there=str(new))
            if difference:
                raise DeltaError(f"a delta joins states of the same tensors, but {difference}")
        return write_delta(out, before, after, labels, threads=threads)
