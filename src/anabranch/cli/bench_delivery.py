"""`anabranch bench delivery`: bytes and rollouts per second through a region's stream and its reader."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from anabranch.cli.common import HelpFormatter, at_least


def add_parser(kinds: Any) -> None:
    parser = kinds.add_parser(
        "delivery", help="bytes and rollouts per second through a stream and its reader, against others' ways",
        formatter_class=HelpFormatter,
        description="Starts a server of its own, and takes turns on it: our appends and reads with redis-benchmark doing the same\n"
        "commands (a process writes while another reads), and groups as Arrow entries with one JSON message per rollout\n"
        "read with XREAD count=1. Needs redis-benchmark (Debian: redis-tools) for the first; without it only ours is told.\n"
        "The server is what $ANABRANCH_REDIS_SERVER names, else the embedded one.",
        epilog="examples:\n  anabranch bench delivery\n"
        "  anabranch bench delivery --only bytes --kb 256 --persistence everysec --rounds 9\n"
        "  anabranch bench delivery --only rollouts --json > rollouts.json\n",
    )  # fmt: skip
    parser.add_argument("--only", choices=["bytes", "rollouts"], help="one of the two (default both)")
    parser.add_argument(
        "--kb", action="append", type=at_least(1), metavar="N", help="size of entries (default 64, 256 and 1024)"
    )
    parser.add_argument(
        "--persistence", action="append", choices=["none", "everysec"],
        help="of the server: in memory alone, or an append-only file synced every second (default both)",
    )  # fmt: skip
    parser.add_argument(
        "--megabytes", type=at_least(1), default=128, metavar="N", help="of entries, in each pass (default 128)"
    )
    parser.add_argument("--rollouts", type=at_least(1), default=2048, metavar="N", help="in each pass (default 2048)")
    parser.add_argument("--rounds", type=at_least(1), default=5, metavar="N", help="after a warm-up (default 5)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from anabranch.deploy.bench_delivery import SIZES, machine, measure_bytes, measure_rollouts
    from anabranch.deploy.delivery_rows import as_json, bytes_table, rollouts_table

    sizes = [kb * 1024 for kb in args.kb] if args.kb else SIZES
    keeps = args.persistence or ("none", "everysec")
    by_size, by_way = [], []
    try:
        if args.only != "rollouts":
            by_size = list(
                measure_bytes(
                    sizes=sizes, persistence=keeps, megabytes=args.megabytes, rounds=args.rounds, tell=_tell
                )
            )  # fmt: skip
        if args.only != "bytes":
            formats = {"json": (lambda message: json.dumps(message).encode(), json.loads)}
            by_way = list(measure_rollouts(formats, rollouts=args.rollouts, rounds=args.rounds, tell=_tell))
    finally:
        _tell("")
    if args.json:
        shown = {"machine": machine(), "bytes": [as_json(r) for r in by_size], "rollouts": [as_json(r) for r in by_way]}
        print(json.dumps(shown, indent=1))
        return 0
    for rows, table in ((by_size, bytes_table), (by_way, rollouts_table)):
        if rows:
            Console(highlight=False).print(table(rows))
    return 0


def _tell(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
