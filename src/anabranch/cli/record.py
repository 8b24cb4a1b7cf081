"""`anabranch record`: streams to Parquet."""

from __future__ import annotations

import argparse
from typing import Any

from anabranch.cli.common import HelpFormatter, add_config_arguments, config_from


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "record",
        help="record every trajectory to Parquet",
        description="Read the streams of all regions through a consumer group of its own and write Parquet files to\n"
        "RUN/trajectories, by run, epoch, day and region. Ends when the run is finished and everything is written.",
        epilog="examples:\n  anabranch record --config run.toml\n  anabranch record --config run.toml --set recorder.seconds_per_file=300\n",
        formatter_class=HelpFormatter,
    )
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    from anabranch.consumers.recorder import record

    return record(config)
