"""`anabranch bench`: the figures of the README, each from a run of its own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from anabranch.cli import (
    bench_delivery,
    bench_lag,
    bench_logprobs,
    bench_packing,
    bench_paths,
    bench_publish,
    bench_resume,
    bench_soak,
)
from anabranch.cli.common import HelpFormatter, add_config_arguments, at_least, config_from


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure: swap pause, publish-to-serve, wait share, tokens/s, bytes per update, the weight codec, a WAN, delivery",
        description="Each benchmark prints what it measured as a table, or with --json as JSON.",
        epilog="examples:\n  anabranch bench loop --steps 30\n  anabranch bench engine --set model.path=MODEL --json\n"
        "  anabranch bench codec --pair PREFIX --peers\n  anabranch bench all\n",
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
    _add_codec(kinds)
    _add_swap(kinds)
    _add_link(kinds)
    bench_publish.add_parser(kinds)
    bench_paths.add_parser(kinds)
    bench_delivery.add_parser(kinds)
    bench_soak.add_parser(kinds)
    bench_packing.add_parser(kinds)
    bench_logprobs.add_parser(kinds)
    bench_resume.add_parser(kinds)
    bench_lag.add_parser(kinds)
    everything = kinds.add_parser(
        "all", help="loop and engine, on the tiny model", formatter_class=HelpFormatter,
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


def _add_codec(kinds: Any) -> None:
    codec = kinds.add_parser(
        "codec", help="bytes per changed element and MB/s of the weight delta, and of others'", formatter_class=HelpFormatter,
        description="Measures over a step pair: PREFIX.base.safetensors holds the weights before a step;\n"
        "PREFIX.change.safetensors holds, for each tensor T that changed, T.index (unsigned flat indices,\n"
        "ascending) and T.bits (the new bit patterns). Bytes are those of the complete file; MB/s are of\n"
        "dense weights, medians, on one thread (one core) and on all.",
        epilog="examples:\n  anabranch bench codec --pair pairs/step --peers\n"
        "  anabranch bench codec --pair pairs/step --peers --snapshot --scan --json > codec.json\n"
        "  anabranch bench codec --sweep density\n"
        "  anabranch bench codec --sweep size --max-elements 100000000 --json > size.json\n",
    )  # fmt: skip
    over = codec.add_mutually_exclusive_group(required=True)
    over.add_argument("--pair", metavar="PREFIX", help="the pair's files without their two endings")
    over.add_argument(
        "--sweep", choices=["density", "size", "dtype"],
        help="synthetic steps instead: 0.05 to 50 %% changed, 1M to 1B elements, or bf16, f16, f32, fp8",
    )  # fmt: skip
    codec.add_argument(
        "--max-elements", type=at_least(1), default=10**9, metavar="N",
        help="--sweep: nothing larger (default 1B: 9 GB of memory)",
    )  # fmt: skip
    codec.add_argument("--plot", type=Path, metavar="FILE", help="--sweep: draw it too (.svg, .png)")
    codec.add_argument(
        "--peers", action="store_true",
        help="the same for int32+bf16, u16 gap+bf16+zstd, dense XOR+zstd, gap+XOR+zstd, and arc_v3",
    )  # fmt: skip
    codec.add_argument("--snapshot", action="store_true", help="full snapshots as well, and zipnn's")
    codec.add_argument(
        "--scan", action="store_true", help="finding the changes alone, against numpy.copyto, in --json too"
    )
    codec.add_argument("--repeats", type=at_least(1), default=7, metavar="N", help="timed runs of each (default 7)")
    codec.add_argument(
        "--budget-s", type=float, default=20.0, metavar="S",
        help="fewer runs of a format that takes more than S seconds (default 20)",
    )  # fmt: skip
    codec.add_argument("--json", action="store_true", help="a list with one object per format and thread count")
    codec.set_defaults(run=run_codec)


def _add_link(kinds: Any) -> None:
    link = kinds.add_parser(
        "link", help="publish to a verified mirror over a slow link, by replica or from the hub (root)",
        formatter_class=HelpFormatter,
        description="Makes two network namespaces of this machine with a slow link between them, a hub on one side, a\n"
        "replica and a follower on the other, and times updates of real sizes from the beginning of\n"
        "publishing to the offer of a verified mirror. Needs root, iproute2, and a program that makes the\n"
        "link: PROGRAM NS_A IP_A NS_B IP_B --delay-ms D --rate-mbit R --loss P --queue-ms Q --seconds S,\n"
        "which prints \"link up\" when it carries packets.",
        epilog="examples:\n  anabranch bench link --program tunlink.py\n"
        "  anabranch bench link --program tunlink.py --model tiny --route replica --rtt-ms 80 --json\n",
    )  # fmt: skip
    link.add_argument("--program", type=Path, required=True, metavar="FILE", help="makes the link (a Python program)")
    link.add_argument(
        "--model", action="append", choices=["tiny", "135m-lr1e-6", "135m-lr1e-5"], metavar="NAME",
        help="size of the updates: tiny, 135m-lr1e-6, 135m-lr1e-5 (default: each in turn; 2 GB of memory)",
    )  # fmt: skip
    link.add_argument(
        "--route", action="append", choices=["replica", "hub"], metavar="NAME", help="replica or hub (default: both)"
    )
    link.add_argument("--rtt-ms", type=float, default=150.0, metavar="MS", help="round trip (default 150)")
    link.add_argument("--rate-mbit", type=float, default=100.0, metavar="MBIT", help="both ways (default 100)")
    link.add_argument("--updates", type=at_least(1), default=5, metavar="N", help="timed, of each (default 5)")
    link.add_argument(
        "--pause-s",
        type=float,
        default=4.0,
        metavar="S",
        help="between updates, so that the link goes idle (default 4)",
    )
    link.add_argument("--json", action="store_true", help="a list with one object per model, route and TCP setting")
    link.set_defaults(run=run_link)


def run_link(args: argparse.Namespace) -> int:
    import json

    from rich.console import Console

    from anabranch.deploy.bench_link import MODELS, ROUTES, as_json, bench_link, table

    rows = []
    try:
        for row in bench_link(
            args.program, models=args.model or tuple(MODELS), routes=args.route or ROUTES, rtt_ms=args.rtt_ms,
            rate_mbit=args.rate_mbit, updates=args.updates, pause_s=args.pause_s, tell=_tell,
        ):  # fmt: skip
            rows.append(row)
    finally:
        _tell("")
    if args.json:
        print(json.dumps([as_json(row) for row in rows], indent=2))
    else:
        Console(highlight=False).print(table(rows))
    return 0


def _add_swap(kinds: Any) -> None:
    swap = kinds.add_parser(
        "swap", help="what weight updates cost a decoding engine: the pause of a swap, throughput lost",
        formatter_class=HelpFormatter,
        description="Updates go the whole way of a producer (fetch, verify, decode, work out, swap), over a channel in memory.\n"
        "First the pause of each of N swaps beside the decode steps of the same run; then tokens/s of windows with\n"
        "an update every few seconds beside windows without, in turn.",
        epilog="examples:\n  anabranch bench swap\n  anabranch bench swap --preset smollm2 --pairs 6 --json\n",
    )  # fmt: skip
    swap.add_argument("--preset", default="tiny", choices=["tiny", "smollm2"], help="default tiny")
    swap.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the engine; default that of the preset")
    swap.add_argument("--swaps", type=at_least(1), default=20, metavar="N", help="swaps to time (default 20)")
    swap.add_argument("--density", type=float, default=0.01, metavar="F", help="share of elements (default 0.01)")
    swap.add_argument("--pairs", type=int, default=8, metavar="N", help="pairs of windows (default 8)")
    swap.add_argument("--window-s", type=float, default=10.0, metavar="S", help="length of a window (default 10)")
    swap.add_argument("--every-s", type=float, default=5.0, metavar="S", help="time between updates (default 5)")
    swap.add_argument("--json", action="store_true", help="one JSON object")
    swap.set_defaults(run=run)


def run_codec(args: argparse.Namespace) -> int:
    import json

    from rich.console import Console

    if args.sweep:
        return _sweep(args)

    from anabranch.deploy.bench_codec import Effort, bench_pair
    from anabranch.deploy.codec_table import render

    try:
        done = bench_pair(
            args.pair, Effort(args.repeats, args.budget_s), peers=args.peers, snapshot=args.snapshot,
            scan=args.scan or not args.json, tell=_tell,
        )  # fmt: skip
    finally:
        _tell("")
    for note in done.notes:
        print(f"anabranch bench: {note}", file=sys.stderr)
    if args.json:
        print(json.dumps([*done.deltas, *done.snapshots, *([done.scan] if done.scan else [])], indent=2))
    else:
        Console(highlight=False).print(render(done))
    return 0


def _sweep(args: argparse.Namespace) -> int:
    import json

    from rich.console import Console

    from anabranch.deploy.codec_sweep import as_json, plot, sweep, table

    rows = []
    try:
        for row in sweep(args.sweep, repeats=args.repeats, max_elements=args.max_elements):
            rows.append(row)
            _tell(
                f"{row.dtype}, {row.elements:,} elements, {row.density:.2%} changed: {row.bytes_per_change:.3f} bytes"
            )
    finally:
        _tell("")
    if args.plot:
        plot(rows, args.plot)
    if args.json:
        print(json.dumps([as_json(row) for row in rows], indent=2))
    else:
        Console(highlight=False).print(table(rows))
    return 0


def _tell(text: str) -> None:
    """One line on a terminal, written over by the next. No spinner: its thread would run in what is measured."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> int:
    import json

    figures: dict[str, Any] = {}
    if args.kind in ("loop", "all"):
        from anabranch.deploy.bench_loop import bench_loop

        figures["loop"] = bench_loop(preset=args.preset, steps=args.steps)
    if args.kind in ("engine", "all"):
        figures["engine"] = _engine(args)
    if args.kind == "swap":
        figures["swap"] = _swap(args)
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


def _swap(args: argparse.Namespace) -> dict[str, Any]:
    import logging

    import structlog

    from anabranch.deploy.bench_loop import preset_config
    from anabranch.producers.bench_swap import bench_swap

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    config = preset_config(args.preset)
    producer = config.producer.model_copy(update={"dtype": args.dtype} if args.dtype else {})
    try:
        return bench_swap(
            config.model.path, producer, config.sampling, swaps=args.swaps, density=args.density, pairs=max(0, args.pairs),
            window_s=args.window_s, every_s=args.every_s, tell=_tell,
        )  # fmt: skip
    finally:
        _tell("")


def _show(value: object) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else str(value)
