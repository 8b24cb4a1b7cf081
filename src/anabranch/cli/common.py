"""What several commands share: configuration arguments and how they become a `RunConfig`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anabranch.schemas.config import RunConfig


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the layout of examples."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)


def add_config_arguments(parser: argparse.ArgumentParser, *, file: str = "TOML file; see `anabranch config`") -> None:
    """`--config`, described by `file`, and `--set`."""
    parser.add_argument("--config", metavar="FILE", type=Path, help=file)
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
    from anabranch.transport.files import read_config_text

    return load_config(
        read_config_text(args.config),
        source=str(args.config or "configuration"),
        beneath=beneath,
        environ=os.environ,
        overrides=args.overrides,
    )
