"""`anabranch config`: show the resolved configuration, or every key with its default and meaning."""

from __future__ import annotations

import argparse
import json
from typing import Any, Literal, get_origin

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
    """A Markdown table of every key, in TOML's notation; docs/configuration.md is made of it."""
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
            default = _toml(field.get_default(call_default_factory=True))
            meaning = "; ".join(filter(None, [field.description or "", _bounds(field.metadata)]))
            cells = [f"`{prefix}{name}`", _type_name(kind), default and f"`{default}`", meaning]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")


def _type_name(kind: Any) -> str:
    """`kind` for people: the values of a choice, else the type's name."""
    members = getattr(kind, "__args__", ())
    if get_origin(kind) is Literal:
        return " or ".join(f"`{_toml(member)}`" for member in members)
    if type(None) in members:
        return _type_name(next(member for member in members if member is not type(None))) + ", or left out"
    origin = get_origin(kind)
    if origin is tuple:
        return f"list of {len(members)} {_type_name(members[0])}s"
    if origin is dict:
        return "table"
    return {"str": "string", "bool": "boolean", "int": "integer", "Path": "path"}.get(kind.__name__, kind.__name__)


def _toml(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(value if isinstance(value, list | tuple | dict) else str(value), ensure_ascii=False)


def _bounds(constraints: list[Any]) -> str:
    """Limits such as "≥ 1, < 5", from annotated-types constraints."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "pattern": "matches"}
    found = [(sign, getattr(c, name, None)) for c in constraints for name, sign in signs.items()]
    return ", ".join(f"{sign} `{limit}`" for sign, limit in found if limit is not None)
