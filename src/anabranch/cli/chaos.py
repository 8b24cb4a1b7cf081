"""`anabranch chaos`: faults on purpose, and an account of every group."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from anabranch.cli.common import HelpFormatter, at_least

_BETWEEN_S = 5.5


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "chaos",
        help="run the whole pipeline in network namespaces and break it, again and again (root)",
        description="Faults on purpose, and an account of every group afterwards.",
        epilog="examples:\n  anabranch chaos run --program tunlink.py --faults 25 --seed 1\n  anabranch chaos kinds\n",
        formatter_class=HelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    chaos = kinds.add_parser(
        "run",
        help="run the tiny preset on several sites and inject faults",
        formatter_class=HelpFormatter,
        description="A hub with the learner and regions with a Redis and a producer each, in network namespaces of this\n"
        "machine, joined by slow links; servers, links, disks and clocks fail by a list drawn from --seed. At the end\n"
        "every group that was ever produced is looked for: trained once, dropped with a cause, or still waiting. Exit\n"
        "code 0 only if all of them are found and every other check holds. Needs root, iproute2, and a program that\n"
        "makes a link: PROGRAM NS_A IP_A NS_B IP_B --delay-ms D --rate-mbit R --loss P --queue-ms Q --seconds S --seed N,\n"
        'which prints "link up" when it carries packets. Scenarios: random faults; cut (one region for --seconds);\n'
        "oom (every Redis at its limit for --seconds).",
        epilog="examples:\n  anabranch chaos run --program tunlink.py --faults 25 --seed 1\n"
        "  anabranch chaos run --program tunlink.py --faults 20 --only kill-learner --only disk-full\n"
        "  anabranch chaos run --program tunlink.py --scenario cut --seconds 300 --report cut.md\n",
    )
    chaos.add_argument("--program", type=Path, required=True, metavar="FILE", help="makes a link (a Python program)")
    chaos.add_argument("--faults", type=at_least(0), default=25, metavar="N", help="how many (default 25)")
    chaos.add_argument("--seed", type=int, default=1, metavar="S", help="draws the faults (default 1)")
    chaos.add_argument("--sites", type=int, default=3, metavar="N", help="the hub and N−1 regions (default 3)")
    chaos.add_argument("--scenario", choices=["random", "cut", "oom"], default="random", help="default random")
    chaos.add_argument(
        "--seconds", type=float, metavar="S", help="cut: how long (default 300); oom: how long (default 60)"
    )
    chaos.add_argument(
        "--seconds-between", type=float, default=_BETWEEN_S, metavar="S", help=f"two faults (default {_BETWEEN_S:g})"
    )
    chaos.add_argument(
        "--only", action="append", default=[], metavar="KIND", help="kinds of faults (see `anabranch chaos kinds`)"
    )
    chaos.add_argument("--dir", type=Path, metavar="DIR", help="logs and evidence (default chaos/SCENARIO-SEED-TIME)")
    chaos.add_argument("--report", type=Path, metavar="FILE", help="Markdown; JSON and SVG beside it (default in DIR)")
    chaos.set_defaults(run=run)
    listing = kinds.add_parser(
        "kinds",
        help="the kinds of faults",
        formatter_class=HelpFormatter,
        epilog="examples:\n  anabranch chaos kinds\n",
    )
    listing.set_defaults(run=run_kinds)


def run(args: argparse.Namespace) -> int:
    import time

    from anabranch.deploy.chaos.run import ChaosOptions, run
    from anabranch.deploy.chaos.scenario import RandomFaults, Scenario
    from anabranch.deploy.chaos.schedule import choose, draw
    from anabranch.deploy.chaos.sites import REGION_NAMES

    scenario: Scenario
    if args.scenario == "random":
        plans = draw(
            faults=args.faults, seed=args.seed, seconds_between=args.seconds_between,
            regions=REGION_NAMES[: max(1, args.sites - 1)], kinds=choose(args.only),
        )  # fmt: skip
        scenario = RandomFaults(plans, seconds_between=args.seconds_between)
    else:
        from anabranch.deploy.chaos.outages import CutOff, OutOfMemory

        scenario = CutOff(args.seconds or 300.0) if args.scenario == "cut" else OutOfMemory(args.seconds or 60.0)
    directory = args.dir or Path("chaos") / f"{args.scenario}-{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    return run(ChaosOptions(args.program, directory, args.seed, args.sites, args.report), scenario)


def run_kinds(args: argparse.Namespace) -> int:
    from anabranch.deploy.chaos.schedule import KINDS, slug

    for name in sorted(KINDS):
        print(f"{slug(name):42} {name}")
    return 0
