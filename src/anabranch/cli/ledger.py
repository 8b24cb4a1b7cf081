"""`anabranch ledger`: where every group went."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from anabranch.cli.common import HelpFormatter, add_config_arguments, config_from

LONGEST_S = 86_400
_ABOUT = """\
Read the ledger of every region and check it: produced + foreign = trained + dropped(cause) + pending. A region that cannot be
reached is shown with what the learner counted there last; so are the learner's alarms, which also go by its fate log.

With --drops, whether dropped groups differ from trained ones: length, age and reward by cause and region, out of the fate log
in the run directory (no Redis is asked). With --audit, that log against the streams, and every delivery in its place.

Exit 0 all holds, 1 something does not, 2 usage, 75 a region cannot be reached (the others hold).
"""
_EXAMPLES = """\
examples:
  anabranch ledger --config run.toml
  anabranch ledger --config run.toml --watch
  anabranch ledger --config run.toml --drops --plot drops.svg
  anabranch ledger --config run.toml --audit --json
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "ledger",
        help="show produced = trained + dropped + pending, per region; whether drops are biased",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    add_config_arguments(parser, of_a_run=True)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--drops", action="store_true", help="how dropped groups differ from trained ones")
    kind.add_argument(
        "--audit", action="store_true", help="the fate log against streams and spools, delivery by delivery"
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, help="with --drops: a picture too, .svg, .png or .pdf")
    parser.add_argument("--json", action="store_true", help="one JSON object (with --watch: one a line)")
    parser.add_argument(
        "--watch", metavar="S", type=float, nargs="?", const=2.0, help="again every S seconds (2), until Ctrl-C"
    )
    parser.set_defaults(run=run, error=parser.error)


def run(args: argparse.Namespace) -> int:
    if args.plot is not None and not args.drops:
        args.error("--plot: of --drops")
    if args.watch is not None and not 0 < args.watch <= LONGEST_S:
        args.error(f"--watch {args.watch:g}: more than 0 seconds, {LONGEST_S} at most")
    config = config_from(args)
    from anabranch.cli.ledger_commands import show

    return show(args, config)
