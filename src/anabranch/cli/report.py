"""`anabranch report`: plots and summary of a recorded run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from anabranch.cli.common import HelpFormatter


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "report",
        help="make plots and summary of a recorded run again",
        description="Read RUN_DIR/metrics.jsonl and write RUN_DIR/plots/*.png, RUN_DIR/summary.json and summary.md.\n"
        "Works on a run that is going on, too.",
        epilog="examples:\n  anabranch report runs/tiny-20260701-120000\n  anabranch report --no-plots runs/quick\n",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--no-plots", action="store_true", help="summary only")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from anabranch.deploy.summary import write_report

    for path in write_report(args.run_dir, plots=not args.no_plots):
        print(path)
    return 0
