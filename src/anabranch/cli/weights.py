"""`anabranch weights`: the weight channel, looked at and looked after."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from anabranch.cli.common import HelpFormatter, add_config_arguments, at_least, config_from
from anabranch.cli.kinds import add_kinds, kind_parser

_ABOUT = """\
The learner publishes each version of the weights once, as what changed; producers follow by the cheapest path of deltas,
skips over several versions, and anchors. These commands show that channel, check it, and look after it.

V is a version: e1.v42, 42 (of the head's epoch), or head.
"""
_DEFAULT_LAST = 20


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "weights",
        help="the weight channel: versions, paths, followers; check it, pin, roll back, collect",
        description=_ABOUT,
        epilog="examples:\n  anabranch weights log --config run.toml\n  anabranch weights followers --config run.toml\n"
        "  anabranch weights verify --config run.toml\n  anabranch weights rollback e1.v40 --config run.toml\n",
        formatter_class=HelpFormatter,
    )
    add_kinds(parser, (
        _add_log, _add_show, _add_verify, _add_path, _add_followers, _add_pin, _add_unpin, _add_rollback, _add_gc, _add_keygen,
    ))  # fmt: skip


def _kind(kinds: Any, name: str, about: str, examples: str, more: str = "") -> argparse.ArgumentParser:
    return kind_parser(kinds, "weights", name, about, examples, more, run)


def _add_log(kinds: Any) -> None:
    parser = _kind(
        kinds, "log", "versions on the channel, newest last",
        " --config run.toml\n --config run.toml --last 5 --follow\n --config run.toml --json | jq .bytes\n",
        "step: bytes from the version before. stored: bytes of all manifests of the version. of dense, changed: of step.\n"
        "A manifest is named delta (from the version before), skip4 (from four before), anchor (from nothing) or fork\n"
        "(the state of a version of an older epoch).",
    )  # fmt: skip
    add_config_arguments(parser, of_a_run=True)
    parser.add_argument(
        "--last",
        type=at_least(1),
        default=_DEFAULT_LAST,
        metavar="N",
        help=f"at most N versions (default {_DEFAULT_LAST})",
    )
    parser.add_argument("--follow", action="store_true", help="go on with new versions as they come, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, one line a version")


def _add_show(kinds: Any) -> None:
    parser = _kind(
        kinds, "show", "all manifests of a version, their signatures, the path to it",
        " e1.v42 --config run.toml\n head --config run.toml --json\n",
    )  # fmt: skip
    parser.add_argument("version", metavar="V", help="e1.v42, 42 (of the head's epoch) or head")
    add_config_arguments(parser, of_a_run=True)
    parser.add_argument("--json", action="store_true", help="one JSON object, every chunk included")


def _add_verify(kinds: Any) -> None:
    parser = _kind(
        kinds, "verify", "check everything the channel keeps, or what the producers serve",
        " --config run.toml\n --from 40 --to head --config run.toml\n --chunks-only --config run.toml\n"
        " --producers --config run.toml\n",
        "Manifests, their signatures, every chunk; then all of it is decoded, and each state's digest compared. Exit 76 if\n"
        "anything is broken: all of it is listed.\n\n"
        "Costs every byte on the channel once (a fork from the middle of an epoch: its way once more), memory for one model\n"
        "and the chunks of one delta. Skips are checked over the state they start from, so they cost no further copy.",
    )  # fmt: skip
    add_config_arguments(parser, of_a_run=True)
    parser.add_argument("--from", dest="first", metavar="V", help="from this version on; the way to it is checked too")
    parser.add_argument("--to", dest="last", metavar="V", help="up to this version")
    parser.add_argument("--chunks-only", action="store_true", help="that all is there and intact; decode nothing")
    parser.add_argument("--threads", type=at_least(1), metavar="N", help="default: channel.fetch_threads")
    parser.add_argument(
        "--producers",
        action="store_true",
        help="instead: have each producer compute the digest of its live engine's weights",
    )
    parser.add_argument(
        "--deadline",
        type=at_least(1),
        default=120,
        metavar="S",
        help="how long producers are waited for (default 120)",
    )


def _add_path(kinds: Any) -> None:
    parser = _kind(
        kinds, "path", "what a follower would fetch from one version to another",
        " nothing head --config run.toml\n e1.v3 e1.v42 --config run.toml\n nothing 42 --config run.toml --json\n",
    )  # fmt: skip
    parser.add_argument("start", metavar="FROM", help="a version, or nothing")
    parser.add_argument("goal", metavar="TO", help="a version on the channel")
    add_config_arguments(parser, of_a_run=True)
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _add_followers(kinds: Any) -> None:
    parser = _kind(
        kinds, "followers", "per producer: version served, since when, path, bytes, last error",
        " --config run.toml\n --config run.toml --json\n",
        "behind: versions published since the one it serves. fetched: bytes since it started, and for the version served.\n"
        "publish-serve: from the manifest to the engine's confirmation. lease: it may need every version from there on.",
    )  # fmt: skip
    add_config_arguments(parser, of_a_run=True)
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _add_pin(kinds: Any) -> None:
    parser = _kind(
        kinds, "pin", "keep a version, and a way to it, whatever retention wants",
        ' e1.v40 --note "best so far" --config run.toml\n head --config run.toml\n',
    )  # fmt: skip
    parser.add_argument("version", metavar="V", help="e1.v42, 42 (of the head's epoch) or head")
    add_config_arguments(parser, of_a_run=True)
    parser.add_argument("--note", default="", metavar="TEXT", help="why, shown by log and show")


def _add_unpin(kinds: Any) -> None:
    parser = _kind(kinds, "unpin", "leave a pinned version to retention again", " e1.v40 --config run.toml\n")
    parser.add_argument("version", metavar="V", help="e1.v42, 42 (of the head's epoch) or head")
    add_config_arguments(parser, of_a_run=True)


def _add_rollback(kinds: Any) -> None:
    parser = _kind(
        kinds, "rollback", "make an older version the head, in a new epoch",
        " e1.v40 --config run.toml\n 40 --yes --config run.toml\n",
        "Opens an epoch whose first version is V: a manifest without bytes, signed if channel.signing_key_file is set. All\n"
        "followers move there as to any version. Nothing is deleted.\n\n"
        "A learner that resumes later goes on from its own newest checkpoint and publishes that in a further epoch. To train\n"
        "on from V, give up its later checkpoints first (`anabranch checkpoints`); the command says which. It then resumes the\n"
        "newest checkpoint at or below V: older than V unless one was made there (learner.checkpoint_every), and there is none\n"
        "if it was deleted (learner.keep_checkpoints).",
    )  # fmt: skip
    parser.add_argument("version", metavar="V", help="e1.v42, or 42 (of the head's epoch)")
    add_config_arguments(parser, of_a_run=True)
    parser.add_argument("--yes", action="store_true", help="do it without asking")
    parser.add_argument(
        "--force", action="store_true", help="even while a learner works: it ends with exit 78 at its next commit"
    )


def _add_gc(kinds: Any) -> None:
    parser = _kind(
        kinds, "gc", "drop what no follower can need and the budget does not cover",
        " --dry-run --config run.toml\n --bytes 1000000000 --config run.toml\n --orphans --dry-run --config run.toml\n",
        "The learner does the same after each version. What a lease, a pin or a late joiner needs stays, whatever the budget.",
    )  # fmt: skip
    add_config_arguments(parser, of_a_run=True)
    parser.add_argument("--dry-run", action="store_true", help="only say what would go and why the rest stays")
    parser.add_argument("--bytes", type=at_least(0), metavar="N", help="budget (default: channel.retain_bytes)")
    parser.add_argument(
        "--orphans", action="store_true", help="also chunks older than an hour that no manifest names (reads them all)"
    )


def _add_keygen(kinds: Any) -> None:
    parser = _kind(
        kinds, "keygen", "make a key to sign manifests with", " /etc/anabranch/signing.pem\n",
        "Writes the private key to FILE, readable by its owner alone, and prints the public key and what to configure.",
    )  # fmt: skip
    parser.add_argument("file", type=Path, metavar="FILE", help="the private key to write; must not exist")


def run(args: argparse.Namespace) -> int:
    if args.kind == "keygen":
        from anabranch.deploy.weights_keys import keygen

        print(keygen(args.file))
        return 0
    if args.kind == "verify" and args.producers and (args.first or args.last or args.chunks_only):
        args.error("--producers goes without --from, --to and --chunks-only")
    config = config_from(args)
    from anabranch.cli.weights_commands import COMMANDS, hub_of

    with hub_of(config) as hub:
        COMMANDS[args.kind](args, config, hub)
    return 0
