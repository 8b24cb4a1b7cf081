"""What `anabranch dead-letter` does, one function a kind: from parsed arguments to output and exit code.

Loaded only when a command runs. Held by tests/unit/cli/test_dead_letter.py, tests/process/test_delivery_commands.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence

from anabranch.cli.confirm import confirmed
from anabranch.deploy import dead_letter_moves as moves
from anabranch.deploy import dead_letter_show, dead_letters
from anabranch.deploy.dead_letter_knowledge import gather
from anabranch.deploy.dead_letters import Row
from anabranch.deploy.plain_text import plain
from anabranch.deploy.regions_asked import Asked, ask_regions, impatient, regions_of
from anabranch.schemas.config import RunConfig
from anabranch.transport import wiring
from anabranch.transport.dead_letters import DeadLetters

NO_SUCH_LETTER = 1


def _connect(args: argparse.Namespace, config: RunConfig) -> Asked[DeadLetters]:
    """Those that answer. Raises StreamUnavailableError when none does."""
    patient = impatient(config)

    def connect(region: str) -> DeadLetters:
        return wiring.connect_dead_letters(patient, region)

    asked = ask_regions(regions_of(config, args.region), connect)
    if not asked.answers:
        asked.end()
    return asked


def _warn(what: str) -> None:
    print(f"anabranch dead-letter: {plain(what)}", file=sys.stderr)


def _missing(ids: Sequence[str], args: argparse.Namespace, asked: Asked[DeadLetters]) -> int:
    """Raises what kept regions from answering: the letters may be there."""
    _close(asked)
    asked.end()
    if not ids:
        return 0
    _warn(f"no such letter: {', '.join(ids)} (in {', '.join(asked.answers)})")
    return NO_SUCH_LETTER


def _ls(args: argparse.Namespace, config: RunConfig) -> int:
    asked = _connect(args, config)
    listed = ask_regions(
        list(asked.answers), lambda region: dead_letters.list_region(region, asked.answers[region], args.cause)
    )
    print(dead_letters.as_json(listed.answers) if args.json else dead_letters.render(listed.answers))
    _close(asked)
    asked.end()
    listed.end()
    return 0


def _show(args: argparse.Namespace, config: RunConfig) -> int:
    letter_id = dead_letters.check_id(args.letter)
    asked = _connect(args, config)
    found = moves.find(asked.answers, letter_id)
    if found is None:
        return _missing([letter_id], args, asked)
    shown = dead_letter_show.examine(*found, run=config.run.name, max_entry_bytes=config.stream.max_entry_bytes)
    print(json.dumps(dead_letter_show.as_json(shown), indent=2) if args.json else dead_letter_show.render(shown))
    if args.payload is not None:
        size = dead_letter_show.save_payload(shown, args.payload)
        print(f"payload of {size:,} bytes saved to {args.payload}", file=sys.stderr)
    return 0


def _close(asked: Asked[DeadLetters]) -> None:
    for letters in asked.answers.values():
        letters.close()


def _choose(
    args: argparse.Namespace, regions: Mapping[str, DeadLetters], known: moves.Knowledge | None = None
) -> moves.Choice:
    return (
        moves.choose_all(regions, args.cause, known) if args.all else moves.choose_named(regions, args.letters, known)
    )


def _requeue(args: argparse.Namespace, config: RunConfig) -> int:
    asked = _connect(args, config)
    choice = _choose(args, asked.answers, gather(impatient(config), _warn))
    return _do(args, asked, choice, moves.requeue, "put back into their streams")


def _drop(args: argparse.Namespace, config: RunConfig) -> int:
    asked = _connect(args, config)
    choice = _choose(args, asked.answers)
    return _do(args, asked, choice, moves.drop, "discarded")


def _do(
    args: argparse.Namespace,
    asked: Asked[DeadLetters],
    choice: moves.Choice,
    move: Callable[[Mapping[str, DeadLetters], Sequence[Row], Callable[[int], None]], moves.Moved],
    done: str,
) -> int:
    rows = choice.rows
    if choice.chosen:
        print(moves.preview(choice, outlooks=move is moves.requeue), flush=True)
    if args.dry_run or not rows:
        print(f"{len(rows):,} would be {done}" if args.dry_run else f"0 {done}")
        return _missing(choice.missing, args, asked)
    if move is moves.drop and not confirmed(args):
        return 0
    count = 0

    def say(so_far: int) -> None:
        nonlocal count
        count = so_far

    try:
        moved = move(asked.answers, rows, say)
    finally:
        print(f"{count:,} {done}", flush=True)
    return _missing([*choice.missing, *(row.letter_id for row in moved.gone)], args, asked)


COMMANDS: dict[str, Callable[[argparse.Namespace, RunConfig], int]] = {
    "ls": _ls,
    "show": _show,
    "requeue": _requeue,
    "drop": _drop,
}
