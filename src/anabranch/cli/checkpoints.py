"""`anabranch checkpoints`: which there are and why, going back to an older one, and conversion for other ranks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.cli.common import HelpFormatter, add_config_arguments, config_from

if TYPE_CHECKING:
    from anabranch.schemas.config import LearnerSection


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "checkpoints",
        help="list the learner's checkpoints; give up the later ones to go back to an older one",
        description="List the complete checkpoints in the run directory, oldest first, with what keeps them\n"
        "(learner.keep_checkpoints, learner.keep_every); the learner resumes from the last. Then what is none:\n"
        "checkpoints that a crash left unfinished (the next one removes them) and those given up (yours to remove).\n"
        "With --give-up-above STEP those of later steps are renamed (given-up-...), and the learner resumes from an older\n"
        "one: to train on from a version that `anabranch weights rollback` went back to. Stop the learner first.\n"
        "With --convert STEP that one is made ready for another number of ranks, or another ZeRO stage above 0; a learner\n"
        "that needs it does so by itself, before it starts.",
        epilog="examples:\n  anabranch checkpoints --config run.toml\n"
        "  anabranch checkpoints --config run.toml --give-up-above 40\n"
        "  anabranch checkpoints --config run.toml --convert 40\n",
        formatter_class=HelpFormatter,
    )
    add_config_arguments(parser, of_a_run=True)
    change = parser.add_mutually_exclusive_group()
    change.add_argument("--give-up-above", type=int, metavar="STEP", help="rename the checkpoints of later steps")
    change.add_argument("--convert", type=int, metavar="STEP", help="make one ready for another number of ranks")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    directory = config.run.directory / "checkpoints"
    from anabranch.learner.checkpoint import give_up_above

    moved = [] if args.give_up_above is None else give_up_above(directory, args.give_up_above)
    if args.convert is not None:
        _convert(directory, args.convert)
    there, others = _complete(directory, config.learner), _others(directory)
    if args.json:
        given_up = [[str(a), str(b)] for a, b in moved]
        print(json.dumps({"checkpoints": there, "others": others, "given_up": given_up}))
        return 0
    for place, aside in moved:
        print(f"{place.name} is {aside.name} now")
    for found in there:
        ranks = f"{found['world_size']} rank{'s' if found['world_size'] != 1 else ''}, stage {found['zero_stage']}"
        converted = f" + {found['universal_bytes']:,} for any number" if found["universal_bytes"] else ""
        print(f"step {found['step']:>8}  {found['bytes']:>15,} bytes  {ranks}{converted}  {found['path']}")
        print(f"{'':15}{found['kept'] or 'goes when the next one is complete'}")
    for other in others:
        print(f"{other['what']}: {other['bytes']:,} bytes  {other['path']}")
    print(f"the learner resumes from step {there[-1]['step']}" if there else f"no complete checkpoint in {directory}")
    return 0


def _complete(directory: Path, learner: LearnerSection) -> list[dict[str, Any]]:
    from anabranch.learner.checkpoint_folder import complete_checkpoints, read_marker
    from anabranch.learner.engine_files import ENGINE_FILE
    from anabranch.learner.retention import kept_checkpoints
    from anabranch.learner.universal import is_universal, universal_folder
    from anabranch.schemas.errors import CheckpointError
    from anabranch.transport.files import read_json

    complete = complete_checkpoints(directory)
    kept = kept_checkpoints(complete, keep=learner.keep_checkpoints, keep_every=learner.keep_every)
    found = []
    for place in complete:
        marker, engine = read_marker(place), read_json(place / ENGINE_FILE, refuse=CheckpointError)
        found.append(
            {
                "step": marker.step, "path": str(place), "bytes": marker.bytes, "kept": kept.get(place, ""),
                "world_size": engine["world_size"], "zero_stage": engine["zero_stage"],
                "universal_bytes": _size(universal_folder(place)) if is_universal(place) else 0,
            }
        )  # fmt: skip
    return found


def _others(directory: Path) -> list[dict[str, Any]]:
    """What takes room beside the complete checkpoints."""
    from anabranch.learner.checkpoint_folder import complete_checkpoints, places
    from anabranch.learner.retention import UNIVERSAL, source_of
    from anabranch.learner.universal import is_universal

    complete = complete_checkpoints(directory)
    converted = [p for p in directory.glob(f"{UNIVERSAL}*") if not is_universal(source_of(p))]
    named = {
        "unfinished": [*directory.glob(".*.tmp"), *(p for p in places(directory) if p not in complete), *converted]
    }
    named["given up"] = list(directory.glob("given-up-*"))
    return [
        {"what": what, "path": str(path), "bytes": _size(path)}
        for what, paths in named.items()
        for path in sorted(paths)
    ]


def _convert(directory: Path, step: int) -> None:
    from anabranch.learner.checkpoint_folder import complete_checkpoints, read_marker, verify
    from anabranch.learner.universal import make_universal
    from anabranch.schemas.errors import CheckpointError

    place = next((p for p in reversed(complete_checkpoints(directory)) if read_marker(p).step == step), None)
    if place is None:
        raise CheckpointError(f"{directory} has no complete checkpoint of step {step}")
    verify(place, read_marker(place))
    make_universal(place)


def _size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
