"""`anabranch demo`: the whole loop on this machine."""

from __future__ import annotations

import argparse
from typing import Any

from anabranch.cli.common import HelpFormatter, add_config_arguments

PRESETS = ("tiny", "smollm2")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="the whole loop on this machine: model, Redis per region, learner, producers, recorder",
        description="Make the model (once), start one embedded Valkey per region and one for the hub, then the same\n"
        "commands that production uses (learn, produce, record), and supervise them until the learner is done.\n"
        "Ctrl-C stops everything and keeps what is needed to go on: give the same --name again to resume.\n"
        "The held-out reward before and after ends the output. Everything is in runs/NAME/.",
        epilog="examples:\n"
        "  anabranch demo\n"
        "  anabranch demo --steps 20 --name quick\n"
        "  anabranch demo --preset smollm2 --steps 50\n"
        "  anabranch demo --set correction.objective=grpo --set learner.lr=3e-5\n"
        "  anabranch demo | jq .reward_mean                one JSON line per step where the output is no terminal\n",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="model, task and settings (default tiny)")
    parser.add_argument("--name", help="name of the run; an interrupted run of that name is resumed")
    parser.add_argument(
        "--steps", type=int, metavar="N",
        help="at most N optimizer steps; short for --set learner.steps=N. The tiny preset stops as soon as the mean reward\n"
        "reaches learner.target_reward = 0.95, after about 40; --set learner.target_reward=2.0 trains on to N",
    )  # fmt: skip
    parser.add_argument("--producers", type=int, metavar="N", default=1, help="producers in each region (default 1)")
    parser.add_argument("--seed", type=int, metavar="N", help="short for --set run.seed=N")
    add_config_arguments(parser, file="TOML file laid over the preset")
    parser.add_argument(
        "--keep-redis", action="store_true", help="keep the Valkey data in the run directory after a completed run"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from anabranch.deploy.demo import demo
    from anabranch.deploy.demo_options import DemoOptions

    return demo(
        DemoOptions(
            preset=args.preset,
            name=args.name,
            steps=args.steps,
            producers=args.producers,
            seed=args.seed,
            config=args.config,
            overrides=tuple(args.overrides),
            keep_redis=args.keep_redis,
        )
    )
