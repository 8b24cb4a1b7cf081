"""`anabranch delta apply`: the checkpoint that a delta file makes of another, as a new one or in place.

Invariant: a base with another digest is refused before a byte is written. A new checkpoint appears under its name after the
result digest was found in what had been written; it replaces a checkpoint only, and nothing that is or holds an input. In place, everything is decoded and its digest checked first, then
journalled, then written; the same command after a kill at any point ends in the same bits. Held by
tests/unit/deploy/test_delta_apply.py, tests/unit/deploy/test_delta_targets.py and tests/process/test_delta_in_place.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from anabranch.deploy.delta_diff import open_checkpoint, refuse_pipes
from anabranch.deploy.delta_jobs import Job, StateDigest, each_job, job_sums, state_digest
from anabranch.deploy.delta_journal import Journal, JournalOf, JournalWriter, changed_frames
from anabranch.deploy.delta_progress import progress
from anabranch.deploy.delta_states import AbsentState, State, StoredState, after
from anabranch.kernels.digest import Sums
from anabranch.kernels.workers import Workers
from anabranch.schemas.errors import DeltaError, UsageError
from anabranch.transport.aside import Aside, real_target, refuse_existing
from anabranch.transport.checkpoint_files import (
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointFiles,
    first_difference,
    journal_path,
    read_header,
    scan_checkpoint,
)
from anabranch.transport.checkpoint_io import OpenCheckpoint
from anabranch.transport.checkpoint_output import copy_form, single_file_form
from anabranch.transport.delta_file import DeltaFile
from anabranch.transport.files import sync_directory


@dataclass(frozen=True)
class Applied:
    """`how`: "written", "changed", "finished" (an interrupted one) or "already". `left_out`: files not copied."""

    how: str
    digest: str
    left_out: tuple[str, ...] = ()


def apply_to_new(old: Path | None, delta: DeltaFile, out: Path, *, force: bool, threads: int) -> Applied:
    """Write the checkpoint that `delta` makes of `old` to `out`, in the form of `old`.

    Args:
        old: None for an anchor alone; `out` is one file then.
        out: a link is written through.
        force: replace `out` if it is a checkpoint (or an empty file).

    Raises:
        DeltaError: another base or layout; a damaged file; the result is not what the delta says.
        UsageError: `out` exists, is inside `old`, is or holds an input or the working directory, or is no checkpoint; a delta without `old`.
        OSError, TemporaryError: something cannot be read or written.
    """
    if old is None and delta.header.manifest.kind != "anchor":
        raise UsageError(f"{delta.path} is a delta: it applies to a checkpoint, which must be given before it")
    is_folder = old is not None and old.is_dir()
    _refuse_loss(out, old, delta)
    refuse_existing(out, replace=force, folder=is_folder)
    out = real_target(out)
    _refuse_other_content(out)
    if old is not None and is_folder and old.resolve() in out.resolve().parents:
        raise UsageError(f"{out} is inside {old}, which it would be a copy of")
    if old is None:
        left_out, digest = _write_new(None, AbsentState(delta.header.layout), delta, out, force, threads)
    else:
        with open_checkpoint(old) as checkpoint:
            base = StoredState(checkpoint)
            check_base(base, delta, old, threads=threads)
            left_out, digest = _write_new(checkpoint.files, base, delta, out, force, threads)
    return Applied("written", digest, tuple(left_out))


def apply_in_place(old: Path, delta: DeltaFile, *, threads: int) -> Applied:
    """Turn the checkpoint `old` into what `delta` makes of it, or end an apply of it that was interrupted.

    Raises:
        DeltaError: as `apply_to_new`; an interrupted apply of another delta.
        UsageError: a file of `old` has other names too, whose content would change as well, or is a pipe or device.
        OSError, TemporaryError: something cannot be read or written.
    """
    refuse_pipes(old)
    files = scan_checkpoint(old, refuse=DeltaError, half_applied=True)
    _refuse_shared(files)
    with OpenCheckpoint(files, refuse=DeltaError, writable=True) as checkpoint:
        journal = journal_path(old)
        state = StoredState(checkpoint)
        if journal.exists():
            _redo(journal, checkpoint, delta, threads)
            return Applied("finished", delta.header.manifest.result_digest)
        scan_checkpoint(old, refuse=DeltaError)  # without a journal it must be whole
        digest = check_base(state, delta, old, already=True, threads=threads)
        if digest == delta.header.manifest.result_digest:
            return Applied("already", digest)
        _write_journal(journal, state, delta, threads)
        _redo(journal, checkpoint, delta, threads)
        return Applied("changed", delta.header.manifest.result_digest)


def check_base(base: State, delta: DeltaFile, name: Path, *, threads: int, already: bool = False) -> str | None:
    """Make sure that `delta` applies to `base`, which is called `name`. Returns its digest, None if nobody needs it.

    Args:
        already: a base that is what `delta` makes is welcome too.

    Raises:
        DeltaError: it does not.
    """
    manifest = delta.header.manifest
    difference = first_difference(base.layout, delta.header.layout, here=str(name), there=str(delta.path))
    if difference:
        raise DeltaError(f"{delta.path} is for another model: {difference}")
    if manifest.kind == "anchor" and not already:
        return None
    digest = state_digest(base, f"checking {name.name}", threads=threads)
    if already and digest == manifest.result_digest:
        return digest
    if manifest.base is not None and digest != manifest.base.digest:
        hint = "; it is already what the delta makes" if digest == manifest.result_digest else ""
        raise DeltaError(f"{name} has digest {digest}, {delta.path} applies to {manifest.base.digest}{hint}")
    return digest


def check_decoded(digest: str, delta: DeltaFile) -> None:
    """Raises DeltaError if `digest`, of a state that was decoded from `delta`, is not the one that it should have."""
    expected = delta.header.manifest.result_digest
    if digest != expected:
        raise DeltaError(f"{delta.path} makes a state with digest {digest}, and says that it would have {expected}")


def _write_new(
    form: CheckpointFiles | None, base: State, delta: DeltaFile, out: Path, force: bool, threads: int
) -> tuple[list[str], str]:
    """Write `out` and check what was written; returns the names of files left out, and the digest."""
    state = after([delta], base)
    left_out: list[str] = []
    with Aside(out, folder=form is not None and form.is_folder) as aside:
        if form is None:
            single_file_form(delta.header.layout, aside.path)
        else:
            left_out = copy_form(form, aside.path)
        files = scan_checkpoint(aside.path, refuse=DeltaError, half_applied=True)
        with OpenCheckpoint(files, refuse=DeltaError, writable=True, lock=False) as written:

            def work(job: Job) -> None:
                for piece, bits in zip(job, state.pieces(job), strict=True):
                    written.write(state.layout.tensors[piece.tensor].name, piece.start, bits)

            each_job(state.layout, work, lambda *_: None, f"writing {out.name}", threads=threads)
            digest = _check_result(written, delta, f"checking {out.name}", threads)
            written.sync()
        if files.is_folder:
            sync_directory(aside.path)
        aside.commit(replace=force)
    return left_out, digest


def _write_journal(journal: Path, base: State, delta: DeltaFile, threads: int) -> None:
    state = after([delta], base)
    digest = StateDigest(state.layout)
    with JournalWriter(journal, JournalOf.of(delta)) as writer:

        def work(job: Job) -> tuple[list[Sums], list[bytes]]:
            old, new = base.pieces(job), state.pieces(job)
            return job_sums(job, new), [
                f for p, a, b in zip(job, old, new, strict=True) for f in changed_frames(p, a, b)
            ]

        def take(job: Job, done: tuple[list[Sums], list[bytes]]) -> None:
            digest.add(job, done[0])
            writer.add(done[1])

        each_job(state.layout, work, take, f"decoding {delta.path.name}", threads=threads)
        check_decoded(digest.hexdigest(), delta)
        writer.commit()


def _redo(path: Path, checkpoint: OpenCheckpoint, delta: DeltaFile, threads: int) -> None:
    """Write the journal at `path` to `checkpoint`, check what is there then, and remove the journal."""
    with Journal(path, checkpoint.layout) as journal:
        if journal.what.delta != delta.identity:
            raise DeltaError(
                f"an apply of another delta ({journal.what.name}, to digest {journal.what.result_digest}) was interrupted "
                f"here; end it first: it is journalled in {path}"
            )
        if journal.what.layout_hash != checkpoint.layout.hash:
            raise DeltaError(f"{path} is of another checkpoint than the one beside it")
        with progress("writing", journal.size_bytes) as advance, Workers(threads) as workers:
            for size_bytes in workers.in_order(lambda frame: frame.write_to(checkpoint), journal.frames()):
                advance(size_bytes)
        checkpoint.sync()
        _check_result(checkpoint, delta, "checking", threads)
        journal.remove()


def _check_result(written: OpenCheckpoint, delta: DeltaFile, what: str, threads: int) -> str:
    """The digest of what was written, read back."""
    digest = state_digest(StoredState(written), what, threads=threads)
    if digest != delta.header.manifest.result_digest:
        raise DeltaError(
            f"what was written has digest {digest}, not {delta.header.manifest.result_digest}: {written.files.path} is "
            "damaged, or somebody else changed it meanwhile"
        )
    return digest


def _refuse_shared(files: CheckpointFiles) -> None:
    for file in files.files:
        if file.is_symlink() or file.stat().st_nlink > 1:
            raise UsageError(
                f"{file} is a link, or has a second name, and what it leads to would change as well; "
                "write a new checkpoint with -o instead"
            )


def _refuse_loss(out: Path, old: Path | None, delta: DeltaFile) -> None:
    """Raises UsageError if replacing `out` would take away an input, a file that one links to, or where we are."""
    target = Path(os.path.realpath(out))
    if old is not None and target == Path(os.path.realpath(old)):
        raise UsageError(f"{out} is {old} itself; --in-place changes it")
    inputs = [delta.path, *([old] if old is not None else []), *(old.iterdir() if old and old.is_dir() else ())]
    for path in inputs:
        # both by its name, which may be a link inside `out`, and by what that leads to
        for place in (Path(os.path.realpath(path.parent)) / path.name, Path(os.path.realpath(path))):
            if target == place:
                raise UsageError(f"{out} is an input, {path}; name another place for the result")
            if target in place.parents:
                raise UsageError(f"{out} holds {path}, which is read; name another place for the result")
    here = Path.cwd()
    if target == here or target in here.parents:
        raise UsageError(f"{out} is or holds the working directory; name another place for the result")


def _refuse_other_content(out: Path) -> None:
    """Raises UsageError if `out` exists and is something else than a checkpoint or an empty file."""
    if out.is_dir():
        if not (out / SINGLE_FILE).is_file() and not (out / INDEX_FILE).is_file():
            raise UsageError(f"{out} exists and is not a checkpoint; remove it first if it may go")
    elif out.exists() and out.stat().st_size:
        try:
            read_header(out, refuse=UsageError)
        except UsageError as error:
            raise UsageError(f"{error}; remove it first if it may go") from error
