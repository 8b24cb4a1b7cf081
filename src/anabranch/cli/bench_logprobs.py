"""`anabranch bench logprobs`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from anabranch.cli.common import add_counts
from anabranch.cli.kinds import kind_parser

ABOUT = "memory and time of log-probs with their backward pass, against log_softmax over logits"
MORE = (
    "Random hidden states and an output head of the sizes given. The two ways take turns, each pass in a process of its own;\n"
    "extra memory is the peak over what was resident before. The reference needs about 12 bytes for each logit, 7 GiB with\n"
    "the defaults. Linux only."
)


def add_parser(kinds: Any) -> None:
    parser = kind_parser(
        kinds, "bench", "logprobs", ABOUT, "\n --rounds 5 --json\n --tokens 512 --vocabulary 32000 --entropy", MORE, run
    )
    add_counts(
        parser,
        (
            ("tokens", 4096, "tokens"),
            ("vocabulary", 151_936, "rows of the output head"),
            ("hidden", 512, "width of the hidden states"),
            ("threads", 1, "CPU threads"),
            ("rounds", 3, "passes of each way"),
        ),
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="default float32")
    parser.add_argument("--entropy", action="store_true", help="entropies too, both ways")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from anabranch.deploy.bench_logprobs import as_json, measure_logprobs, table
    from anabranch.deploy.summary import machine_facts

    row = measure_logprobs(
        tokens=args.tokens, vocabulary=args.vocabulary, hidden=args.hidden, dtype=args.dtype, threads=args.threads,
        entropy=args.entropy, rounds=args.rounds, tell=lambda text: print(text, file=sys.stderr, flush=True),
    )  # fmt: skip
    if args.json:
        print(json.dumps({"machine": machine_facts(), **as_json(row)}, indent=1))
    else:
        Console(highlight=False).print(table(row))
    return 0
