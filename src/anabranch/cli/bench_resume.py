"""`anabranch bench resume`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from anabranch.cli.kinds import kind_parser

ABOUT = "a learner that resumes from checkpoints against one that never stopped, bit for bit"
MORE = (
    "Trains the preset's model on random tokens: one process straight to the end, saving after steps drawn from the seed;\n"
    "another loads each of these checkpoints into a new engine and goes on to the end. After every step the loss and the\n"
    "digest of all weights are compared. Exit code 1 if any differ."
)


def add_parser(kinds: Any) -> None:
    examples = "\n --stages 1 3 --ranks 2 --resumes 3\n --set learner.dtype=float32 --seed 7 --json"
    parser = kind_parser(kinds, "bench", "resume", ABOUT, examples, MORE, run)
    parser.add_argument("--preset", default="tiny", choices=["tiny", "smollm2"], help="default tiny")
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="steps of the run (default 12)")
    parser.add_argument("--resumes", type=int, default=10, metavar="N", help="of them resumed after (default 10)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="which ones (default 0)")
    parser.add_argument(
        "--stages",
        type=int,
        nargs="+",
        default=[0, 1, 2, 3],
        choices=[0, 1, 2, 3],
        metavar="Z",
        help="ZeRO (default all)",
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], metavar="R", help="default 1 and 2")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the preset")
    parser.add_argument("--json", action="store_true", help="a list with one object per stage and number of ranks")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from anabranch.deploy.bench_loop import preset_config
    from anabranch.deploy.demo_options import DemoOptions, resolve
    from anabranch.learner.bench_resume import as_json, bench_resume

    if not 0 < args.resumes < args.steps:
        args.error("--resumes: at least 1, and fewer than --steps")
    model = preset_config(args.preset).model.path
    config = resolve(DemoOptions(preset=args.preset), [f"model.path={json.dumps(str(model))}", *args.set])
    done = list(
        bench_resume(
            config, stages=args.stages, ranks=args.ranks, steps=args.steps, resumes=args.resumes, seed=args.seed,
            tell=lambda text: print(text, file=sys.stderr),
        )
    )  # fmt: skip
    if args.json:
        print(json.dumps([as_json(row) for row in done], indent=2))
    else:
        table = Table(
            "stage", "ranks", "dtype / computed in", "resumed after steps", "equal losses", "equal weights", ""
        )
        for row in done:
            table.add_row(
                str(row.stage), str(row.ranks), f"{row.dtype} / {row.compute_dtype}", " ".join(map(str, row.resumed_at)),
                f"{row.equal_losses} of {row.losses}", f"{row.equal_weights} of {row.weights}",
                "bit-equal" if row.equal else "DIFFERS",
            )  # fmt: skip
        Console(highlight=False).print(table)
    return 0 if all(row.equal for row in done) else 1
