"""`anabranch config`: show the resolved configuration, or every key with its default and meaning."""

from __future__ import annotations

import argparse
from typing import Any

from anabranch.cli.common import HelpFormatter, add_config_arguments, config_from


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "config",
        help="show the resolved configuration",
        description="Show the configuration that file, environment and --set resolve to; passwords are masked.",
        epilog="examples:\n  anabranch config --set learner.lr=1e-6\n  anabranch config --keys | less\n",
        formatter_class=HelpFormatter,
    )
    add_config_arguments(parser)
    parser.add_argument("--keys", action="store_true", help="list every key with type, default and meaning instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from anabranch.schemas.config import dump_toml

    print(describe_keys() if args.keys else dump_toml(config_from(args)), end="")
    return 0


def describe_keys() -> str:
    """A Markdown table of every key; docs/configuration.md is this text."""
    from anabranch.schemas.config import RunConfig

    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    _describe(RunConfig, "", lines)
    return "\n".join(lines) + "\n"


def _describe(model: Any, prefix: str, lines: list[str]) -> None:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if hasattr(kind, "model_fields"):
            _describe(kind, f"{prefix}{name}.", lines)
        elif getattr(kind, "__args__", None) and hasattr(kind.__args__[-1], "model_fields"):
            _describe(kind.__args__[-1], f"{prefix}{name}.NAME.", lines)
        else:
            type_name = str(getattr(kind, "__name__", kind) if not getattr(kind, "__args__", None) else kind)
            type_name = type_name.replace("typing.", "").replace("pathlib._local.", "").replace("|", "\\|")
            default = str(field.get_default(call_default_factory=True)).replace("|", "\\|")
            lines.append(f"| `{prefix}{name}` | {type_name} | `{default}` | {field.description or ''} |")
