"""`anabranch learn`: the learner, one process per rank."""

from __future__ import annotations

import argparse
from typing import Any

from anabranch.cli.common import HelpFormatter, add_config_arguments, config_from


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "learn",
        help="run the learner",
        description="Consume trajectories of all regions, train with DeepSpeed, publish weights. Resumes from the newest\n"
        "checkpoint in the run directory. With learner.world_size above 1 it starts its ranks on this node; under a\n"
        "launcher (RANK and WORLD_SIZE set) it is one rank.",
        epilog="examples:\n  anabranch learn --config run.toml\n  anabranch learn --config run.toml --set learner.world_size=2 --set learner.zero_stage=3\n",
        formatter_class=HelpFormatter,
    )
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    from anabranch.learner.service import learn

    return learn(config)
