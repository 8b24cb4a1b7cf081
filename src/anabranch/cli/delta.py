"""`anabranch delta`: weight deltas as files, between any two checkpoints of the same tensors."""

from __future__ import annotations

import argparse
import errno
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.cli.common import HelpFormatter, at_least

if TYPE_CHECKING:
    from anabranch.deploy.delta_encode import WrittenDelta

_ABOUT = """\
A delta file holds what changes from one state of a model to another, without loss, in about one byte per changed
weight, and says by digest what it applies to and what results. Checkpoints are .safetensors files or Hugging Face
folders (model.safetensors, or shards with an index); memory is bounded whatever their size.
"""
_THEIR_COMMAND_LINE = (
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip
_FULL = (errno.ENOSPC, errno.EDQUOT)  # main says it better


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "delta",
        help="make, apply, show, merge and check weight deltas as files",
        description=_ABOUT,
        epilog="examples:\n  anabranch delta diff OLD NEW -o step.delta\n  anabranch delta apply OLD step.delta -o NEW\n"
        "  anabranch delta show step.delta\n",
        formatter_class=HelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    _add_diff(kinds)
    _add_apply(kinds)
    _add_show(kinds)
    _add_merge(kinds)
    _add_verify(kinds)


def _kind(kinds: Any, name: str, about: str, usage: str, examples: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(
        name, help=about, usage=f"anabranch delta {usage}", epilog=examples, formatter_class=HelpFormatter
    )
    parser.set_defaults(run=run, error=parser.error)
    parser.add_argument(
        "--threads", type=at_least(1), metavar="N", help="default: all cores; memory grows by a few chunks with each"
    )
    return parser


def _add_diff(kinds: Any) -> None:
    parser = _kind(
        kinds, "diff", "write what changes from OLD to NEW to a delta file",
        "diff OLD NEW -o FILE [options]\n       anabranch delta diff --anchor NEW -o FILE [options]",
        "examples:\n  anabranch delta diff OLD NEW -o step.delta\n"
        "  anabranch delta diff OLD NEW -o 7.delta --run exp3 --base-version 6 --version 7\n"
        "  anabranch delta diff --anchor NEW -o full.delta\n",
    )  # fmt: skip
    parser.add_argument("old", type=Path, metavar="OLD", help="checkpoint before")
    parser.add_argument("new", type=Path, metavar="NEW", nargs="?", help="checkpoint after")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", required=True, help="the delta file to write")
    parser.add_argument("--anchor", action="store_true", help="a full snapshot of NEW, compressed; OLD is left out")
    parser.add_argument("--run", default="local", dest="run_name", metavar="R", help="name of the run (default local)")
    parser.add_argument("--epoch", type=at_least(0), default=0, metavar="E", help="epoch of the run (default 0)")
    parser.add_argument(
        "--base-version", type=at_least(0), metavar="V", help="version of OLD (default: one less than NEW's, or 0)"
    )
    parser.add_argument(
        "--version",
        type=at_least(0),
        metavar="V",
        help="version of NEW (default: one more than OLD's, or 1; anchor: 0)",
    )


def _add_apply(kinds: Any) -> None:
    parser = _kind(
        kinds, "apply", "make NEW of OLD and a delta file",
        "apply OLD FILE (-o NEW [--force] | --in-place) [options]\n"
        "       anabranch delta apply ANCHOR -o NEW.safetensors [--force] [options]",
        "examples:\n  anabranch delta apply OLD step.delta -o NEW\n  anabranch delta apply OLD step.delta --in-place\n"
        "  anabranch delta apply full.delta -o NEW.safetensors\n",
    )  # fmt: skip
    parser.add_argument("old", type=Path, metavar="OLD", nargs="?", help="checkpoint the delta applies to")
    parser.add_argument("file", type=Path, metavar="FILE", help="delta file; an anchor needs no OLD")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("-o", "--out", type=Path, metavar="NEW", help="checkpoint to write, a file or folder as OLD is")
    where.add_argument("--in-place", action="store_true", help="change OLD itself; killed at any point, run it again")
    parser.add_argument("--force", action="store_true", help="replace NEW if it exists")


def _add_show(kinds: Any) -> None:
    parser = _kind(
        kinds, "show", "print what a delta file holds", "show FILE [--all] [--json] [options]",
        "examples:\n  anabranch delta show step.delta\n  anabranch delta show step.delta --json | jq .density\n",
    )  # fmt: skip
    parser.add_argument("file", type=Path, metavar="FILE", help="delta file")
    parser.add_argument("--all", action="store_true", dest="every", help="every tensor, not layers, of a large model")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _add_merge(kinds: Any) -> None:
    parser = _kind(
        kinds, "merge", "make one delta file of several that follow on each other",
        "merge FILE FILE [FILE ...] -o FILE [--base OLD] [options]",
        "examples:\n  anabranch delta merge 7.delta 8.delta -o 6-8.delta\n"
        "  anabranch delta merge 7.delta 8.delta -o 6-8.delta --base OLD\n"
        "  anabranch delta merge full.delta 7.delta 8.delta -o full-8.delta\n",
    )  # fmt: skip
    parser.add_argument(
        "files", type=Path, metavar="FILE", nargs="+", help="delta files, oldest first; an anchor only first"
    )
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", required=True, help="the delta file to write")
    parser.add_argument(
        "--base", type=Path, metavar="OLD", help="checkpoint the first applies to: the result is smaller"
    )


def _add_verify(kinds: Any) -> None:
    parser = _kind(
        kinds, "verify", "check a delta file without writing anything",
        "verify FILE [--base OLD] [--result NEW] [options]",
        "examples:\n  anabranch delta verify step.delta\n  anabranch delta verify step.delta --base OLD --result NEW\n",
    )  # fmt: skip
    parser.add_argument("file", type=Path, metavar="FILE", help="delta file")
    parser.add_argument("--base", type=Path, metavar="OLD", help="also decode it over this checkpoint")
    parser.add_argument("--result", type=Path, metavar="NEW", help="also check that this checkpoint is what results")


def run(args: argparse.Namespace) -> int:
    import os

    threads = args.threads or len(os.sched_getaffinity(0))
    with _told_plainly(), _cleaning_up():
        commands = {"diff": _diff, "apply": _apply, "show": _show, "merge": _merge, "verify": _verify}
        commands[args.kind](args, threads)
    return 0


def _diff(args: argparse.Namespace, threads: int) -> None:
    old, new = (None, args.old) if args.anchor else (args.old, args.new)
    if args.anchor and args.new is not None:
        args.error("--anchor takes one checkpoint")
    if new is None:
        args.error("NEW is missing (or give --anchor for a full snapshot of the one checkpoint)")
    if args.anchor and args.base_version is not None:
        args.error("an anchor has no --base-version")
    base, version = args.base_version, args.version
    if args.anchor:
        version = version or 0
    else:
        base = base if base is not None else (version or 1) - 1
        version = version if version is not None else base + 1
        if not 0 <= base < version:
            args.error(f"--version {version} does not come after --base-version {base}")

    from anabranch.deploy.delta_diff import diff
    from anabranch.deploy.delta_encode import Labels

    labels = Labels(args.run_name, args.epoch, version, base, learner_step=version)
    _tell_written(args.out, diff(old, new, args.out, labels, threads=threads))


def _apply(args: argparse.Namespace, threads: int) -> None:
    if args.old is None and args.in_place:
        args.error("--in-place needs OLD, the checkpoint to change")
    if args.force and args.in_place:
        args.error("--force goes with -o")

    from anabranch.deploy.delta_apply import apply_in_place, apply_to_new
    from anabranch.transport.delta_file import DeltaFile

    with DeltaFile(args.file) as delta:
        if args.in_place:
            done = apply_in_place(args.old, delta, threads=threads)
        else:
            done = apply_to_new(args.old, delta, args.out, force=args.force, threads=threads)
    what = {
        "written": f"wrote {args.out}",
        "changed": f"changed {args.old}",
        "finished": f"ended the interrupted change of {args.old}",
        "already": f"nothing to do: {args.old} is already what {args.file} makes",
    }[done.how]
    print(f"{what}, digest {done.digest}")
    for name in done.left_out:
        print(f"not copied, since it holds weights that are no part of the checkpoint: {name}", file=sys.stderr)


def _show(args: argparse.Namespace, threads: int) -> None:
    from anabranch.deploy.delta_show import describe, summary, table
    from anabranch.transport.delta_file import DeltaFile

    with DeltaFile(args.file) as delta:
        about = describe(delta, threads=threads)
    if args.json:
        import json

        print(json.dumps(about, indent=2))
        return
    from rich.console import Console

    print("\n".join(f"{what:<17}{value}" for what, value in summary(about)) + "\n")
    Console(width=None if sys.stdout.isatty() else 140, highlight=False).print(table(about, every=args.every))


def _merge(args: argparse.Namespace, threads: int) -> None:
    if len(args.files) < 2:
        args.error("a merge needs two delta files or more")

    from anabranch.deploy.delta_merge import merge

    _tell_written(args.out, merge(args.files, args.out, base=args.base, threads=threads))


def _verify(args: argparse.Namespace, threads: int) -> None:
    from anabranch.deploy.delta_verify import verify
    from anabranch.transport.delta_file import DeltaFile

    with DeltaFile(args.file) as delta:
        print("\n".join(verify(delta, base=args.base, result=args.result, threads=threads)))


def _tell_written(out: Path, written: WrittenDelta) -> None:
    manifest, stages = written.header.manifest, len(written.header.stages)
    if manifest.kind == "anchor":
        what = f"all of the model, {written.size_bytes / max(manifest.full_bytes, 1):.3f} of its bytes"
    else:
        what = f"{manifest.changed_elements:,} of {manifest.total_elements:,} elements changed"
        if stages > 1:
            what = f"{manifest.changed_elements:,} changes in {stages} stages"
        if manifest.changed_elements:
            what += f", {written.size_bytes / manifest.changed_elements:.3f} bytes each"
    print(f"wrote {out}: {written.size_bytes:,} bytes, {what}")
    print(f"{manifest.base.digest if manifest.base else 'nothing'} -> {manifest.result_digest}")


@contextmanager
def _told_plainly() -> Iterator[None]:
    """An OSError says which file, and whether the command line or the machine is to be changed."""
    from anabranch.schemas.errors import TemporaryError, UsageError

    try:
        yield
    except OSError as error:
        if error.errno is None or error.errno in _FULL or isinstance(error, BrokenPipeError):
            raise
        line = f"{error.filename}: {error.strerror}" if error.filename else f"{error.strerror}"
        raise (UsageError if error.errno in _THEIR_COMMAND_LINE else TemporaryError)(line) from error


@contextmanager
def _cleaning_up() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does: what is half made is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
