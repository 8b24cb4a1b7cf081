"""`anabranch checkpoints`: which there are, and going back to an older one."""

from __future__ import annotations

import argparse
import json
from typing import Any

from anabranch.cli.common import HelpFormatter, add_config_arguments, config_from


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "checkpoints",
        help="list the learner's checkpoints; give up the later ones to go back to an older one",
        description="List the complete checkpoints in the run directory, oldest first; the learner resumes from the last.\n"
        "With --give-up-above STEP those of later steps are renamed (given-up-...), and it resumes from an older one:\n"
        "to train on from a version that `anabranch weights rollback` went back to. Stop the learner first.",
        epilog="examples:\n  anabranch checkpoints --config run.toml\n"
        "  anabranch checkpoints --config run.toml --give-up-above 40\n",
        formatter_class=HelpFormatter,
    )
    add_config_arguments(parser, of_a_run=True)
    parser.add_argument("--give-up-above", type=int, metavar="STEP", help="rename the checkpoints of later steps")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    directory = config_from(args).run.directory / "checkpoints"
    from anabranch.learner.checkpoint import give_up_above
    from anabranch.learner.checkpoint_folder import complete_checkpoints, read_marker

    moved = [] if args.give_up_above is None else give_up_above(directory, args.give_up_above)
    there = [
        {"step": marker.step, "path": str(place), "bytes": sum(size for size, _ in marker.files.values())}
        for place in complete_checkpoints(directory)
        for marker in [read_marker(place)]
    ]
    if args.json:
        print(json.dumps({"checkpoints": there, "given_up": [[str(a), str(b)] for a, b in moved]}))
        return 0
    for place, aside in moved:
        print(f"{place.name} is {aside.name} now")
    for found in there:
        print(f"step {found['step']:>8}  {found['bytes']:>15,} bytes  {found['path']}")
    print(f"the learner resumes from step {there[-1]['step']}" if there else f"no complete checkpoint in {directory}")
    return 0
