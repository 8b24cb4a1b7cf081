"""`anabranch bench paths`: what a follower that is n versions behind fetches."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from anabranch.cli.common import HelpFormatter


def add_parser(kinds: Any) -> None:
    paths = kinds.add_parser(
        "paths",
        help="fetches and bytes of a follower that is n versions behind, on a run's channel",
        description="Plans every pair of versions 1, 2, 4, ... apart on the weight channel that a demo has left (with\n"
        "--keep-redis), and compares bytes with the chain of single deltas. The run's data is copied.",
        epilog="examples:\n  anabranch demo --name paths --steps 80 --keep-redis\n  anabranch bench paths runs/paths\n",
        formatter_class=HelpFormatter,
    )
    paths.add_argument("run_directory", type=Path, metavar="RUN", help="run directory of a demo with --keep-redis")
    paths.add_argument("--json", action="store_true", help="a list with one object per distance")
    paths.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from anabranch.deploy.bench_paths import as_json, index_of_run, measure, table

    rows = measure(index_of_run(args.run_directory))
    if args.json:
        print(json.dumps(as_json(rows), indent=1))
    else:
        Console().print(table(rows))
    return 0
