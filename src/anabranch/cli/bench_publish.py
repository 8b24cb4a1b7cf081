"""`anabranch bench publish`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from anabranch.cli.common import HelpFormatter


def add_parser(kinds: Any) -> None:
    parser = kinds.add_parser(
        "publish", help="what publishing in the background costs a learner step", formatter_class=HelpFormatter,
        description="Steps of one learner on random tokens, without and with publishing in turns, over a Valkey of its own.\n"
        "Set the size of a step with --set, e.g. learner.groups_per_step=4.",
        epilog="examples:\n  anabranch bench publish\n"
        "  anabranch bench publish --preset smollm2 --rounds 2 --steps 3 --set channel.codec_threads=1 --json\n",
    )  # fmt: skip
    parser.add_argument("--preset", default="tiny", choices=["tiny", "smollm2"], help="default tiny")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="timed rounds after a warm-up (default 5)")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="steps of each kind in a round (default 8)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the preset")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from anabranch.deploy.bench_loop import preset_config
    from anabranch.deploy.demo_options import DemoOptions, resolve
    from anabranch.learner.bench_publish import bench_publish

    model = preset_config(args.preset).model.path
    config = resolve(DemoOptions(preset=args.preset), [f"model.path={json.dumps(str(model))}", *args.set])
    figures = bench_publish(
        config, rounds=max(1, args.rounds), steps=max(1, args.steps), tell=lambda text: print(text, file=sys.stderr)
    )
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"  {name:<36} {value:,}")
    return 0
