"""`anabranch bench lag`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from anabranch.cli.kinds import kind_parser

ABOUT = "reward against step at fixed lags, under each correction"
MORE = (
    "Trains the preset's model in this machine's memory, without Redis and engines: rollouts are sampled by the weights of\n"
    "so many versions ago, the step is the learner's own. A cell is one correction at one lag, learning rate and seed; its\n"
    "result is appended to --results as soon as it is there. An interrupted study goes on with --resume."
)


def add_parser(kinds: Any) -> None:
    examples = (
        "\n --objectives default none --lags 0 8 --report lag"
        "\n --objectives all dppo_tv,narrow_with_age none,veto_low=0,veto_high=1e9 --results lag.jsonl --resume"
        "\n --results lag.jsonl --no-run --report lag"
    )
    parser = kind_parser(kinds, "bench", "lag", ABOUT, examples, MORE, run)
    parser.add_argument("--preset", default="tiny", choices=["tiny"], help="default tiny")
    parser.add_argument(
        "--objectives", nargs="+", default=["all"], metavar="NAME[,KEY=VALUE]",
        help="values of correction.objective, each with keys of [correction] that go with it (a key alone is true); `default`,\n"
        "`all` (default)",
    )  # fmt: skip
    parser.add_argument(
        "--lags",
        type=int,
        nargs="+",
        default=[0, 1, 4, 8, 16, 32],
        metavar="N",
        help="versions (default 0 1 4 8 16 32)",
    )
    parser.add_argument(
        "--lrs", type=float, nargs="+", default=[1e-4], metavar="LR", help="learning rates (default 1e-4, the preset's)"
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 0 to N - 1 (default 3)")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="optimizer steps of a cell (default 60)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="cells at a time (default 2)")
    parser.add_argument(
        "--results", type=Path, default=Path("lag.jsonl"), metavar="FILE", help="a line per cell (default lag.jsonl)"
    )
    parser.add_argument("--resume", action="store_true", help="add the cells that --results does not have yet")
    parser.add_argument("--no-run", action="store_true", help="train nothing: only report on --results")
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="README.md (the part between its marks), lag.json and plots go there"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the preset")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    from anabranch.deploy import lag_report, lag_study
    from anabranch.deploy.lag_summary import summarise

    if not args.no_run:
        _run_cells(args)
    rows = lag_study.read_rows(args.results)
    if args.report:
        for path in lag_report.write_report(args.results, args.report):
            print(path, file=sys.stderr)
    if args.json:
        print(json.dumps(lag_report.as_json(rows, summarise(rows))))
    else:
        print("\n".join(map(lag_report.chapter, summarise(rows))))
    return 0


def _run_cells(args: argparse.Namespace) -> None:
    from anabranch.deploy import lag_study
    from anabranch.deploy.bench_lag import run_study
    from anabranch.deploy.bench_loop import preset_config
    from anabranch.deploy.lag_measures import Measuring

    model = preset_config(args.preset).model.path
    study = lag_study.make_study(
        preset=args.preset, overrides=args.set, model=model, corrections=args.objectives, lags=args.lags, lrs=args.lrs,
        seeds=args.seeds, steps=args.steps, measuring=Measuring(),
    )  # fmt: skip
    with lag_study.open_results(args.results, resume=args.resume) as results:
        run_study(study, results, jobs=args.jobs, tell=_tell)


def _tell(text: str) -> None:
    """A line that ends stays; another is written over the last one, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
    elif text.endswith("\n"):
        print(text, end="", file=sys.stderr, flush=True)
