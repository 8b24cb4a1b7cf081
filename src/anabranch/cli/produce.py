"""`anabranch produce`: one rollout producer."""

from __future__ import annotations

import argparse
from typing import Any

from anabranch.cli.common import HelpFormatter, add_config_arguments, config_from


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "produce",
        help="run one rollout producer in a region",
        description="Sample rollouts with vLLM, score them, and stream them into the region's Redis; follow the weight\n"
        "channel on the hub and swap new weights in while sampling goes on.",
        epilog="examples:\n  anabranch produce --config run.toml --region east\n"
        "  anabranch produce --config run.toml --region west --set producer.max_num_seqs=128\n",
        formatter_class=HelpFormatter,
    )
    add_config_arguments(parser)
    parser.add_argument("--region", required=True, metavar="NAME", help="a key of [regions]")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    from anabranch.producers.service import produce

    return produce(config, args.region)
