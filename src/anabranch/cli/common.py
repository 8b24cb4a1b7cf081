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


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", type=Path, help="TOML file; see `anabranch config`")
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
    from anabranch.schemas.errors import ConfigError

    text = ""
    if args.config is not None:
        try:
            text = args.config.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --config {args.config}: {error}") from error
    return load_config(
        text,
        source=str(args.config or "configuration"),
        beneath=beneath,
        environ=os.environ,
        overrides=args.overrides,
    )
