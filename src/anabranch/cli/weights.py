"""`anabranch weights`: what is on the weight channel."""

from __future__ import annotations

import argparse
from typing import Any

from anabranch.cli.common import HelpFormatter, add_config_arguments, config_from


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "weights",
        help="show the weight channel: versions, bytes, digests",
        description="List the manifests on the channel, newest last, and the version each producer serves.",
        epilog="examples:\n  anabranch weights --config run.toml\n  anabranch weights --config run.toml --last 5\n",
        formatter_class=HelpFormatter,
    )
    add_config_arguments(parser)
    parser.add_argument("--last", type=int, default=20, metavar="N", help="at most N versions back (default 20)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    from anabranch.consumers.weights_log import render_weights

    print(render_weights(config, last=args.last))
    return 0
