"""`anabranch replay`: what a run recorded, looked at and computed again."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from anabranch.cli import replay_look
from anabranch.cli.common import HelpFormatter, add_config_arguments, config_from
from anabranch.cli.kinds import add_kinds, kind_parser
from anabranch.cli.replay_step import add_step

_ABOUT = """\
A recorder keeps every trajectory, a learner the fate of every group. These commands read those records; they change nothing, and may be
used while the run goes on.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="what a run recorded: trajectories and steps, looked at, explained and computed again",
        description=_ABOUT,
        epilog="examples:\n  anabranch replay ls --run runs/demo --fate age\n  anabranch replay why 17/3 --run runs/demo\n"
        "  anabranch replay steps --config run.toml\n",
        formatter_class=HelpFormatter,
    )
    add_kinds(parser, (*replay_look.adders(), _add_steps, add_step))


def _add_steps(kinds: Any) -> None:
    parser = kind_parser(
        kinds, "replay", "steps", "steps with a whole record, newest last", " --config run.toml\n --run runs/demo --last 5\n --run runs/demo --json\n",
        "loss and grad norm: of the first update. flat: groups without gradient. skipped: groups that a gate kept from the\n"
        "weights. A step that two epochs did is there twice.\n",
        run_steps,
    )  # fmt: skip
    add_config_arguments(parser)
    add_run_argument(parser)
    parser.add_argument("--last", type=at_least_one, metavar="N", help="only the N newest")
    parser.add_argument("--json", action="store_true", help="one JSON object a step")


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run", metavar="DIR", type=Path, dest="recorded_run", help="run directory (runs/NAME); default: that of --config"
    )  # fmt: skip


def run_directory(args: argparse.Namespace) -> Path:
    """Raises UsageError: there is no such directory."""
    from anabranch.schemas.errors import UsageError

    directory: Path = args.recorded_run or config_from(args).run.directory
    if not directory.is_dir():
        raise UsageError(f"there is no run directory {directory}: give --run DIR, or --config of a run on this machine")
    return directory


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def run_steps(args: argparse.Namespace) -> int:
    from anabranch.consumers.step_records import read_facts, record_bytes, recorded_steps
    from anabranch.schemas.errors import StepRecordError

    directory = run_directory(args)
    places, code = recorded_steps(directory), 0
    if args.last is not None:
        places = places[max(0, len(places) - args.last) :]
    if not args.json:
        print("epoch    step          loss     grad norm  groups  flat  skipped    seconds        bytes")
    for place in places:
        try:
            facts, size = read_facts(place), record_bytes(place)
        except StepRecordError as error:  # the others can be shown all the same
            print(f"anabranch replay: {error}", file=sys.stderr)
            code = error.exit_code
            continue
        if args.json:
            print(json.dumps(facts.model_dump(mode="json") | {"bytes": size}))
            continue
        print(
            f"{facts.epoch:5} {facts.step:7}  {facts.loss:12.5g}  {facts.grad_norm:12.5g} {len(facts.groups):7} "
            f"{len(facts.zero_variance):5} {len(facts.skipped):8} {facts.step_s:10.3f} {size:12,}"
        )
    if not places and not args.json:
        print(f"no step is recorded in {directory}")
    return code
