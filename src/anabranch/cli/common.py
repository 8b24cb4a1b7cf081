"""What several commands share: configuration arguments and how they become a `RunConfig`, and arguments that are numbers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anabranch.schemas.config import RunConfig


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the layout of examples."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)


def at_least(least: int) -> Callable[[str], int]:
    """The `type` of an argument that is a whole number, in decimal digits, from `least` on."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} on")
        return int(text)

    return parse


def add_counts(parser: argparse.ArgumentParser, counts: Iterable[tuple[str, int, str]]) -> None:
    """Options that are whole numbers from 1 on: the name of each, its default, and what it is a number of."""
    for name, default, about in counts:
        parser.add_argument(
            f"--{name}", type=at_least(1), default=default, metavar="N", help=f"{about} (default {default})"
        )


def add_config_arguments(
    parser: argparse.ArgumentParser, *, file: str = "TOML file; see `anabranch config`", of_a_run: bool = False
) -> None:
    """`--config`, described by `file`, and `--set`; with `of_a_run` also `--run`."""
    parser.add_argument("--config", metavar="FILE", type=Path, help=file)
    if of_a_run:
        parser.add_argument(
            "--run", metavar="DIR", type=Path, dest="run_directory",
            help="run directory of a demo that is running (runs/NAME): its configuration and its servers",
        )  # fmt: skip
    parser.add_argument(
        "--set",
        metavar="A.B=C",
        action="append",
        default=[],
        dest="overrides",
        help="override one key, may be repeated (wins over ANABRANCH__A__B, which wins over the file)",
    )


def config_from(args: argparse.Namespace, *, beneath: str = "") -> RunConfig:
    """`beneath`: TOML text that the file overrides (a preset). Raises ConfigError if the file cannot be read or the configuration is not valid."""
    from anabranch.schemas.config import load_config
    from anabranch.schemas.errors import UsageError
    from anabranch.transport.files import read_config_text

    file, environ = args.config, dict(os.environ)
    run_directory = getattr(args, "run_directory", None)
    if run_directory is not None:
        from anabranch.deploy.demo_urls import environment_of

        if file is not None:
            raise UsageError("--run and --config: give one of them")
        file, environ = run_directory / "config.toml", environment_of(run_directory) | environ
    return load_config(
        read_config_text(file),
        source=str(file or "configuration"),
        beneath=beneath,
        environ=environ,
        overrides=args.overrides,
    )
