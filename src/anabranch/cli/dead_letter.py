"""`anabranch dead-letter`: entries nobody could read, looked at, put back, or discarded."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from anabranch.cli.common import HelpFormatter, add_config_arguments, config_from
from anabranch.cli.confirm import add_yes
from anabranch.cli.kinds import add_kinds, kind_parser

_ABOUT = """\
An entry of a stream that cannot be read (wrong checksum, another schema, numbers that are not finite), or that was delivered too
often, is set aside in its region's Redis with its cause, and counted as dropped:dead_letter. Its group is sampled again.

LETTER is an id as `ls` shows it. Exit 0 done, 1 no such letter, 2 usage, 75 a region cannot be reached (the others are done).
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "dead-letter",
        help="entries nobody could read: list, look, put back, discard",
        description=_ABOUT,
        epilog="examples:\n  anabranch dead-letter ls --config run.toml\n"
        "  anabranch dead-letter show 1767225600000-0 --config run.toml\n"
        "  anabranch dead-letter requeue --all --cause 'schema version' --dry-run --config run.toml\n"
        "  anabranch dead-letter drop --all --yes --config run.toml\n",
        formatter_class=HelpFormatter,
    )
    add_kinds(parser, (_add_ls, _add_show, _add_requeue, _add_drop))


def _kind(kinds: Any, name: str, about: str, examples: str, more: str = "") -> argparse.ArgumentParser:
    return kind_parser(kinds, "dead-letter", name, about, examples, more, run)


def _add_common(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, of_a_run=True)
    parser.add_argument("--region", metavar="NAME", help="only this one, a key of [regions]")


def _add_cause(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cause", default="", metavar="TEXT", help="only those whose cause contains TEXT, in any case")


def _add_letters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("letters", nargs="*", metavar="LETTER", help="ids, as `ls` shows them")
    parser.add_argument("--all", action="store_true", help="every letter, or every one that --cause selects")
    _add_cause(parser)
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")


def _add_ls(kinds: Any) -> None:
    parser = _kind(
        kinds, "ls", "all of them, with their cause, and how many of each cause",
        " --config run.toml\n --cause checksum --config run.toml\n --region east --json --config run.toml\n",
        "time: when it was set aside, by the region's clock. group, producer: what the entry says of itself, not verified.\n"
        "Causes are counted with words that hold digits as #.",
    )  # fmt: skip
    _add_common(parser)
    _add_cause(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object, region by region")


def _add_show(kinds: Any) -> None:
    parser = _kind(
        kinds, "show", "all that can be read of one",
        " 1767225600000-0 --config run.toml\n 1767225600000-0 --payload entry.arrow --config run.toml\n",
        "Each field of the envelope, whether size and checksum fit the payload, the rollouts if the payload is a record batch, its\n"
        "first bytes if not. What could move the cursor is shown escaped; passwords of URLs are hidden.",
    )  # fmt: skip
    parser.add_argument("letter", metavar="LETTER", help="an id, as `ls` shows it")
    _add_common(parser)
    parser.add_argument("--payload", type=Path, metavar="FILE", help="save the payload as it is to this new file")
    parser.add_argument("--json", action="store_true", help="one JSON object, token ids and log-probs included")


def _add_requeue(kinds: Any) -> None:
    parser = _kind(
        kinds, "requeue", "put them back into their stream, as they were",
        " 1767225600000-0 --config run.toml\n --all --cause 'delivered' --config run.toml\n"
        " --all --dry-run --config run.toml\n",
        "Says of each what will happen: the learner reads it; it is set aside again, since it still cannot be read; it is dropped as\n"
        "too old, or as a duplicate, since its group has been trained. The ledger counts it as pending again.\n\n"
        "Whether a group has been trained is known where the run directory is (the learner's node).",
    )  # fmt: skip
    _add_common(parser)
    _add_letters(parser)


def _add_drop(kinds: Any) -> None:
    parser = _kind(
        kinds, "drop", "discard them",
        " 1767225600000-0 --config run.toml\n --all --cause checksum --yes --config run.toml\n"
        " --all --dry-run --config run.toml\n",
        "They stay counted as dropped:dead_letter. It asks on a terminal; elsewhere it wants --yes.",
    )  # fmt: skip
    _add_common(parser)
    _add_letters(parser)
    add_yes(parser)


def run(args: argparse.Namespace) -> int:
    if args.kind in ("requeue", "drop"):
        if bool(args.letters) == args.all:
            args.error("give one LETTER or more, or --all" if not args.all else "--all goes without LETTER")
        if args.cause and not args.all:
            args.error("--cause selects with --all")
    config = config_from(args)
    from anabranch.cli.dead_letter_commands import COMMANDS

    return COMMANDS[args.kind](args, config)
