"""What `anabranch ledger` does, from parsed arguments to output and exit code. Loaded only when it runs.

Held by tests/unit/cli/test_ledger.py and tests/process/test_ledger_command.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from anabranch.consumers.drops import tally, verdicts
from anabranch.consumers.fate_files import FATES_DIRECTORY, read_fates
from anabranch.deploy import ledger_audit, ledger_show
from anabranch.deploy.ledger_look import look
from anabranch.deploy.plain_text import plain
from anabranch.deploy.regions_asked import ask_regions, impatient
from anabranch.schemas.config import RunConfig
from anabranch.schemas.errors import EXIT_TEMPORARY, TemporaryError, UsageError

DOES_NOT_HOLD = 1
CLEAR = "\x1b[H\x1b[2J"

Shown = tuple[str, Any, int]  # text, plain data, exit code


def show(args: argparse.Namespace, config: RunConfig) -> int:
    kind: Callable[[RunConfig], Shown] = partial(_balance, as_json=args.json)
    if args.audit:
        kind = _audit
    elif args.drops:
        kind = partial(_drops, plot=args.plot)
    if args.watch is None:
        return _print(kind(config), as_json=args.json)
    while True:
        text, data, code = kind(config)
        if not args.json and sys.stdout.isatty():
            sys.stdout.write(CLEAR)
        _print((text, data, code), as_json=args.json, one_line=True)
        sys.stdout.flush()
        time.sleep(args.watch)


def _print(shown: Shown, *, as_json: bool, one_line: bool = False) -> int:
    text, data, code = shown
    print(json.dumps(data, indent=None if one_line else 2) if as_json else text)
    return code


def _balance(config: RunConfig, *, as_json: bool) -> Shown:
    ledgers = look(config)
    _say_who_is_away(ledgers.asked.away)
    for alarm in ledgers.alarms if as_json else ():
        print(f"anabranch ledger: learner: {plain(alarm)}", file=sys.stderr)
    code = DOES_NOT_HOLD if ledgers.unbalanced or ledgers.alarms else EXIT_TEMPORARY if ledgers.asked.away else 0
    return ledger_show.render(ledgers), ledger_show.as_plain(ledgers), code


def _drops(config: RunConfig, plot: Path | None) -> Shown:
    if plot is not None:
        from anabranch.deploy import drops_plot  # loads matplotlib

        drops_plot.check_name(plot)
    tallies = tally(read_fates(_fates(config)))
    said = verdicts(tallies)
    if plot is not None:
        drops_plot.write_drops_plot(tallies, plot, title=config.run.name)
    return ledger_show.render_drops(tallies, said), ledger_show.drops_as_plain(tallies, said), 0


def _audit(config: RunConfig) -> Shown:
    fates, patient = _fates(config), impatient(config)
    spools = ledger_audit.read_spools(config.spool_directory)
    asked = ask_regions(sorted(config.regions), lambda region: ledger_audit.read_places(patient, region))
    audits = ledger_audit.audit(asked.answers, spools, read_fates(fates))
    left = ledger_audit.left_behind(spools, config.regions, read_fates(fates))
    _say_who_is_away(asked.away)
    wrong = bool(left) or any(found.wrong for found in audits.values())
    data = {region: asdict(found) for region, found in audits.items()}
    data |= {region: {"not_in_configuration": groups} for region, groups in left.items()}
    data |= {region: {"unreachable": plain(str(error))} for region, error in asked.away.items()}
    code = DOES_NOT_HOLD if wrong else EXIT_TEMPORARY if asked.away else 0
    return ledger_audit.render_audit(audits, spools_here=bool(spools), left=left), data, code


def _say_who_is_away(away: Mapping[str, TemporaryError]) -> None:
    for error in away.values():
        print(f"anabranch ledger: {plain(str(error))}", file=sys.stderr)


def _fates(config: RunConfig) -> Path:
    """Raises UsageError: it is not on this machine."""
    directory = config.run.directory / FATES_DIRECTORY
    if not directory.is_dir():
        raise UsageError(f"there is no fate log in {directory}: run this where the learner's run directory is")
    return directory
