"""`anabranch stream`: the trajectory streams, looked at; readers and producers that are gone, forgotten."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from anabranch.cli.common import HelpFormatter, add_config_arguments, config_from
from anabranch.cli.confirm import add_yes
from anabranch.cli.kinds import add_kinds, kind_parser

_ABOUT = """\
Entries stay in a region's stream until every consumer group has acknowledged them. These commands show who is how far, and let
the stream forget a group or a producer that will not come back.

Exit 0 done, 1 no such group or producer, 2 usage, 75 a region cannot be reached (the others are done).
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "stream",
        help="the trajectory streams: who holds entries; forget readers and producers that are gone",
        description=_ABOUT,
        epilog="examples:\n  anabranch stream ls --config run.toml\n"
        "  anabranch stream forget-group recorder --region east --config run.toml\n",
        formatter_class=HelpFormatter,
    )
    add_kinds(parser, (_add_ls, _add_forget_group, _add_forget_producer, _add_mend_aof))


def _kind(kinds: Any, name: str, about: str, examples: str, more: str) -> argparse.ArgumentParser:
    return kind_parser(kinds, "stream", name, about, examples, more, run)


def _add_common(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, of_a_run=True)
    parser.add_argument("--region", metavar="NAME", help="only this one, a key of [regions]")


def _add_ls(kinds: Any) -> None:
    parser = _kind(
        kinds, "ls", "entries, bytes and consumer groups of each region", " --config run.toml\n --json --config run.toml\n",
        "not read: entries that the group has not been given. pending: given, and not acknowledged yet (the learner acknowledges\n"
        "when a checkpoint is durable). last read: since a consumer of the group asked (Redis 7.0: since one got something). A group\n"
        "that holds entries and has not read for 10 minutes is pointed out.",
    )  # fmt: skip
    _add_common(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object, region by region")


def _add_forget_group(kinds: Any) -> None:
    parser = _kind(
        kinds, "forget-group", "a reader is gone for good: nothing waits for it any more",
        " recorder --config run.toml\n recorder --region east --yes --config run.toml\n",
        "What that group has not read is not kept for it. The learner's group is never forgotten. A recorder that starts again\n"
        "makes a new group, which begins at the oldest entry that is still there.",
    )  # fmt: skip
    parser.add_argument("name", metavar="NAME", help="a group as `ls` shows it")
    _add_common(parser)
    add_yes(parser)


def _add_forget_producer(kinds: Any) -> None:
    parser = _kind(
        kinds, "forget-producer", "a producer is gone for good, and so is its spool",
        " east-0-c0ffee --config run.toml\n",
        "Drops what the streams remember of its sequence numbers. Refused (75) while entries of it are not settled; and while it\n"
        "may live: it appended or reported within the last minute, it holds leases, or the hub does not say. Forgotten, a living\n"
        "one gives again what its spool holds, which the ledger counts twice. Living producers forget, by themselves, those whose\n"
        "spools they find without an owner.",
    )  # fmt: skip
    parser.add_argument("name", metavar="PRODUCER", help="a producer's id, as statuses and logs name it")
    parser.add_argument("--force", action="store_true", help="even if it may live")
    _add_common(parser)
    add_yes(parser)


def _add_mend_aof(kinds: Any) -> None:
    parser = _kind(
        kinds, "mend-aof", "a server does not start any more after its disk was full: close the holes in its append-only file",
        " --dry-run /var/lib/redis/appendonlydir/appendonly.aof.2.incr.aof\n /var/lib/redis/appendonlydir/appendonly.aof.2.incr.aof\n",
        "A Redis or Valkey that was short of disk after it had rewritten its file can leave zero bytes between two commands. It goes on,\n"
        "and does not start again (\"Bad file format reading the append only file\"). This drops the zeros and nothing else; the server\n"
        "must be down. A file that is damaged in another way is left as it is (exit 76).",
    )  # fmt: skip
    parser.add_argument("file", metavar="FILE", type=Path, help="the file that the server's log names")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # bytes of the command line that are none
        return False
    return True


def _mend_aof(args: argparse.Namespace) -> int:
    from anabranch.deploy.aof_holes import close_holes, find_holes

    try:
        holes = find_holes(args.file) if args.dry_run else close_holes(args.file)
    except OSError as error:
        print(f"anabranch stream: {error}", file=sys.stderr)
        return 1
    for offset, size in holes:
        print(f"{size:,} zero bytes at byte {offset:,}")
    done = "would be dropped; no command is lost" if args.dry_run else "dropped; no command is lost: start the server"
    print(f"{args.file}: {sum(size for _, size in holes):,} bytes {done}" if holes else f"{args.file}: no holes")
    return 0


def run(args: argparse.Namespace) -> int:
    if args.kind == "forget-group":
        from anabranch.deploy.stream_state import refuse_learner

        refuse_learner(args.name)
    if args.kind == "mend-aof":
        return _mend_aof(args)
    if args.kind != "ls" and not _is_text(args.name):
        args.error("a name is UTF-8 text, as `ls` and the logs show it")
    config = config_from(args)
    from anabranch.cli.stream_commands import COMMANDS

    return COMMANDS[args.kind](args, config)
