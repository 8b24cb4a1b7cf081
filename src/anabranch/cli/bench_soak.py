"""`anabranch bench soak`: memory over very many small groups."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from anabranch.cli.common import HelpFormatter

LEAST_GROUPS = 5_000  # ten checkpoints


def add_parser(kinds: Any) -> None:
    parser = kinds.add_parser(
        "soak", help="memory of Redis, producer and learner over very many small groups", formatter_class=HelpFormatter,
        description="A hub, a region, a producer and a learner, each a process: permits, spool, streams, reader, fate log, ledger\n"
        "and checkpoints of the feed are real; groups are made up and a step does nothing, so engine and optimizer\n"
        "are not in it. Memory is judged after the first third of the run. 1 GB of disk for 100,000 groups.",
        epilog="examples:\n  anabranch bench soak\n  anabranch bench soak --groups 20000 --plot soak.svg\n"
        "  anabranch bench soak --json > soak.json\n",
    )  # fmt: skip
    parser.add_argument(
        "--groups", type=_enough, default=100_000, metavar="N", help=f"at least {LEAST_GROUPS:,} (default 100,000)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it too (.svg, .png)")
    parser.add_argument("--json", action="store_true", help="one JSON object, with all samples")
    parser.set_defaults(run=run)


def _enough(text: str) -> int:
    if (number := int(text)) < LEAST_GROUPS:
        raise argparse.ArgumentTypeError(f"at least {LEAST_GROUPS}")
    return number


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from anabranch.deploy.bench_delivery import machine
    from anabranch.deploy.bench_soak import as_json, plot, soak, table

    try:
        done = soak(args.groups, tell=_tell)
    finally:
        _tell("")
    if args.plot:
        plot(done, args.plot)
    if args.json:
        print(json.dumps({"machine": machine(), **as_json(done)}, indent=1))
    else:
        Console(highlight=False).print(table(done))
    return 0 if done.kept else 1


def _tell(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
