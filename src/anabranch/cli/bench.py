"""`anabranch bench`: the figures of the README, each from a run of its own."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from anabranch.cli.common import HelpFormatter, add_config_arguments, config_from


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure: swap pause, publish-to-serve, wait share, tokens/s, bytes per update",
        description="Each benchmark prints what it measured as a table, or with --json as one JSON object.",
        epilog="examples:\n  anabranch bench loop --steps 30\n  anabranch bench engine --set model.path=MODEL --json\n"
        "  anabranch bench all\n",
        formatter_class=HelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    loop = kinds.add_parser(
        "loop", help="run the demo for some steps and report its figures", formatter_class=HelpFormatter,
        epilog="examples:\n  anabranch bench loop --steps 30\n  anabranch bench loop --preset smollm2 --steps 10 --json\n",
    )  # fmt: skip
    engine = kinds.add_parser(
        "engine", help="decode speed, and the pause of a weight swap against a decode step", formatter_class=HelpFormatter,
        epilog="examples:\n  anabranch bench engine\n  anabranch bench engine --set model.path=MODEL --density 0.01\n",
    )  # fmt: skip
    everything = kinds.add_parser(
        "all", help="all of the above, on the tiny model", formatter_class=HelpFormatter,
        epilog="examples:\n  anabranch bench all\n  anabranch bench all --json > figures.json\n",
    )  # fmt: skip
    for kind in (loop, everything):
        kind.add_argument("--preset", default="tiny", choices=["tiny", "smollm2"], help="default tiny")
        kind.add_argument("--steps", type=int, default=30, metavar="N", help="learner steps (default 30)")
    add_config_arguments(engine)
    for kind in (engine, everything):
        kind.add_argument("--swaps", type=int, default=50, metavar="N", help="swaps to time (default 50)")
        kind.add_argument("--density", type=float, default=0.01, metavar="F", help="share of elements (default 0.01)")
    for kind in (loop, engine, everything):
        kind.add_argument("--json", action="store_true", help="one JSON object")
        kind.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import json

    figures: dict[str, Any] = {}
    if args.kind in ("loop", "all"):
        from anabranch.deploy.bench_loop import bench_loop

        figures["loop"] = bench_loop(preset=args.preset, steps=args.steps)
    if args.kind in ("engine", "all"):
        figures["engine"] = _engine(args)
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        for kind, values in figures.items():
            print(f"{kind}\n" + "\n".join(f"  {name:<28} {_show(value)}" for name, value in values.items()))
    return 0


def _engine(args: argparse.Namespace) -> dict[str, Any]:
    from anabranch.deploy.bench_loop import preset_config
    from anabranch.producers.bench_engine import bench_engine

    if args.kind == "all":
        config = preset_config(args.preset)
    else:
        config = config_from(args)
        if config.model.path == Path("model"):
            config = preset_config("tiny")
    return bench_engine(config.model.path, config.producer, config.sampling, swaps=args.swaps, density=args.density)


def _show(value: object) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else str(value)
