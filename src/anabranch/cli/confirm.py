"""Asking before something is done that cannot be undone. Held by tests/unit/cli/test_confirm.py."""

from __future__ import annotations

import argparse
import sys


def add_yes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="do it without asking")


def confirmed(args: argparse.Namespace) -> bool:
    """Whether `--yes` was given or the person at the terminal says so; "nothing was changed" is printed if not.

    Ends with exit 2 where there is no terminal to ask on.
    """
    if args.yes:
        return True
    if not sys.stdin.isatty():
        args.error("not asked on a terminal: give --yes to do it")
    print("Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    print("nothing was changed")
    return False
