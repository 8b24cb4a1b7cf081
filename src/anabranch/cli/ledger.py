"""`anabranch ledger`: where every group went."""

from __future__ import annotations

import argparse
from typing import Any

from anabranch.cli.common import HelpFormatter, add_config_arguments, config_from


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "ledger",
        help="show produced = trained + dropped + pending, per region",
        description="Read the ledger of every region and check it. Exit 0 if produced = trained + dropped + pending\n"
        "holds everywhere, 1 if it does not.",
        epilog="examples:\n  anabranch ledger --config run.toml\n  anabranch ledger --config run.toml --json\n",
        formatter_class=HelpFormatter,
    )
    add_config_arguments(parser, of_a_run=True)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    from anabranch.consumers.ledger import read_ledger, render_ledger

    ledger = read_ledger(config)
    print(render_ledger(ledger, as_json=args.json))
    return 0 if all(counts.balanced for counts in ledger.values()) else 1
