"""`anabranch permits`: rights to start a group: handed out, leased, given up."""

from __future__ import annotations

import argparse
from typing import Any

from anabranch.cli.common import HelpFormatter, add_config_arguments, config_from


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "permits",
        help="rights to start a group: how many are out, with whom, and where the bound is",
        description="Read the permits of the run on the hub. No more than min((max_age + version + 1) * groups_per_step, total)\n"
        "indices are handed out, the lowest, beside those that were abandoned.",
        epilog="examples:\n  anabranch permits --config run.toml\n  anabranch permits --config run.toml --json\n",
        formatter_class=HelpFormatter,
    )
    add_config_arguments(parser, of_a_run=True)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    from anabranch.deploy import permits_state
    from anabranch.deploy.regions_asked import impatient
    from anabranch.transport.wiring import connect_hub

    hub = connect_hub(impatient(config))
    try:
        state = hub.permits.state()
        reported = {producer: status.region for producer, status in hub.runs.producers().items()}
    finally:
        hub.close()
    if args.json:
        print(permits_state.as_json(state, reported, config.regions))
    else:
        print(permits_state.render(config.run.name, state, reported, config.regions))
    return 0
