"""Rollouts per second against pickled messages too: `.venv/bin/python -I benchmarks/pickled_rollouts.py --json`.

As `anabranch bench delivery --only rollouts`, with pickle beside JSON. Nothing in the package unpickles anything; here the
only bytes that are unpickled are those that this process wrote a moment before to a server of its own.
"""

from __future__ import annotations

import argparse
import json
import pickle

from rich.console import Console

from anabranch.deploy.bench_delivery import machine, measure_rollouts
from anabranch.deploy.delivery_rows import as_json, rollouts_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=2048, metavar="N", help="in each pass (default 2048)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="after a warm-up (default 5)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args()
    formats = {
        "json": (lambda message: json.dumps(message).encode(), json.loads),
        "pickle": (pickle.dumps, pickle.loads),
    }
    rows = list(measure_rollouts(formats, rollouts=args.rollouts, rounds=args.rounds))
    if args.json:
        print(json.dumps({"machine": machine(), "rollouts": [as_json(row) for row in rows]}, indent=1))
    else:
        Console(highlight=False).print(rollouts_table(rows))


if __name__ == "__main__":
    main()
