"""Commands that have kinds, `anabranch COMMAND KIND`: their parsers, made in one way.

Invariant: without a kind the help goes to stderr and the exit code is 2. Held by tests/test_cli_surface.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from anabranch.cli.common import HelpFormatter


def add_kinds(parser: argparse.ArgumentParser, adders: Sequence[Callable[[Any], None]]) -> None:
    """Give `parser` a KIND; each of `adders` is called with where it adds its own (`kind_parser`)."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND")
    for add in adders:
        add(kinds)

    def without_kind(_: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return 2

    parser.set_defaults(run=without_kind)


def kind_parser(
    kinds: Any,
    command: str,
    name: str,
    about: str,
    examples: str,
    more: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """The parser of `anabranch COMMAND NAME`. `examples`: what follows that, a line each."""
    shown = "".join(f"  anabranch {command} {name}{example}\n" for example in examples.splitlines())
    parser: argparse.ArgumentParser = kinds.add_parser(
        name, help=about, description=more or None, epilog=f"examples:\n{shown}", formatter_class=HelpFormatter
    )
    parser.set_defaults(run=run, error=parser.error)
    return parser
