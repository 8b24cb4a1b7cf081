"""`anabranch bench packing`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from anabranch.cli.common import add_counts
from anabranch.cli.kinds import kind_parser

ABOUT = "padding, balance over ranks, and tokens/s of packed rows and shared prompts"
MORE = (
    "First the plan of a step on a log-normal mix of lengths: what is padding, what the budget leaves over, how even ranks\n"
    "are. Then a random Qwen3 of the size given, forward and backward on groups of equal lengths: padded rows, packed rows,\n"
    "and packed rows with shared prompts in turns of one run, and how far their gradients are apart."
)


def add_parser(kinds: Any) -> None:
    parser = kind_parser(
        kinds,
        "bench",
        "packing",
        ABOUT,
        "\n --rounds 5 --json\n --hidden 768 --layers 12 --vocabulary 32000",
        MORE,
        run,
    )
    add_counts(
        parser,
        (
            ("groups", 2, "groups of the timed step"),
            ("group-size", 8, "rollouts of each"),
            ("prompt", 256, "tokens of a prompt"),
            ("completion", 64, "tokens of a completion"),
            ("budget", 8192, "positions of a microbatch (learner.micro_batch_tokens)"),
            ("rounds", 3, "timed passes of each way"),
            ("threads", 1, "CPU threads"),
            ("hidden", 384, "width of the model"),
            ("layers", 8, "layers of the model"),
            ("vocabulary", 8192, "tokens that the model knows"),
            ("mix", 512, "rollouts of the log-normal mix (groups of group-size)"),
        ),
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    import torch

    from anabranch.learner.bench_packing import BenchModel, BenchRollouts, plan_figures, speed_figures

    torch.set_num_threads(args.threads)
    model = BenchModel(args.hidden, args.layers, args.vocabulary)
    mix = BenchRollouts(max(1, args.mix // args.group_size), args.group_size, prompt=128, completion=256, spread=1.0)
    rollouts = BenchRollouts(args.groups, args.group_size, args.prompt, args.completion)
    figures = {
        "plan": plan_figures(model, mix, budget_tokens=args.budget),
        "speed": speed_figures(
            model, rollouts, budget_tokens=args.budget, rounds=args.rounds,
            tell=lambda text: print(text, file=sys.stderr),
        ),
    }  # fmt: skip
    if args.json:
        print(json.dumps(figures, indent=2))
        return 0
    for part, values in figures.items():
        print(part)
        for name, value in values.items():
            print(f"  {name:<40} {value:,}" if isinstance(value, int | float) else f"  {name:<40} {value}")
    return 0
