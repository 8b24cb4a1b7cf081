"""Building a `RunConfig` from layers: TOML text < environment < `--set a.b=c`.

Invariant: pure. The caller reads files and the environment; every mistake comes back as one ConfigError that
names the key, where it was set, and (for an unknown key) the nearest known one. Passwords in URLs never reach
a message or a dump (`dump_toml`, `dump_json`).
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from anabranch.schemas.config.models import RunConfig
from anabranch.schemas.errors import ConfigError, UnsafeSamplingError, redact_url

ENV_PREFIX = "ANABRANCH__"
_MAY_HOLD_SECRETS = frozenset(
    {"url", "weights_url", "blobs", "blob_options", "store", "store_options"}
)  # a mistaken value is not quoted
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")


def load_config(
    toml_text: str = "",
    *,
    source: str = "configuration",
    beneath: str = "",
    environ: Mapping[str, str] | None = None,
    overrides: Iterable[str] = (),
) -> RunConfig:
    """A validated `RunConfig`; later layers win.

    Args:
        toml_text: content of a TOML file; `source` names it in errors.
        beneath: TOML text whose keys `toml_text` overrides one by one (a preset).
        environ: variables such as `ANABRANCH__LEARNER__LR=1e-4` (others are ignored).
        overrides: `a.b=c` strings; values are TOML (`1e-4`, `true`, `[0.9, 0.95]`), anything else is a string.

    Raises:
        ConfigError: bad TOML, unknown key, wrong type, contradictory values.
        UnsafeSamplingError: sampling settings that would falsify the recorded log-probs.
    """
    lower, upper = _parse(beneath, "the preset"), _parse(toml_text, source)
    if "params" in _table(upper, "task"):  # they belong to one dataset: another file's are none of ours
        _table(lower, "task").pop("params", None)
    tree = _lay_over(lower, upper)
    origins: dict[tuple[str, ...], str] = {}
    for name, value in sorted((environ or {}).items()):
        if name.startswith(ENV_PREFIX):
            path = name[len(ENV_PREFIX) :].lower().split("__")
            _put(tree, path, _value(value), f"environment variable {name}", origins)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {redact_url(override)!r} is not of the form section.key=value")
        _put(tree, key.strip().split("."), _value(value), f"--set {key}", origins)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        causes = error.errors(include_url=False)
        unsafe = any(isinstance(e.get("ctx", {}).get("error"), UnsafeSamplingError) for e in causes)
        kind = UnsafeSamplingError if unsafe else ConfigError
        raise kind("\n".join(_explain(e, origins) for e in causes)) from None


def dump_json(config: RunConfig) -> dict[str, Any]:
    """The resolved configuration as plain data, passwords replaced by `***`."""
    tree: dict[str, Any] = config.model_dump(mode="json", exclude_none=True)
    _redact(tree)
    return tree


def dump_toml(config: RunConfig) -> str:
    """The resolved configuration as TOML, passwords replaced by `***`."""
    lines: list[str] = []
    _toml_table(dump_json(config), (), lines)
    return "\n".join(lines).strip() + "\n"


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from error


def _table(tree: dict[str, Any], key: str) -> dict[str, Any]:
    value = tree.get(key)
    return value if isinstance(value, dict) else {}


def _lay_over(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        merged[key] = _lay_over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _put(tree: dict[str, Any], path: list[str], value: Any, where: str, origins: dict[tuple[str, ...], str]) -> None:
    node = tree
    for part in path[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{where}: {part!r} is a value, not a section")
    node[path[-1]] = value
    origins[tuple(path)] = where


def _explain(error: Any, origins: Mapping[tuple[str, ...], str]) -> str:
    loc = [str(p) for p in error["loc"]]
    where = _origin(tuple(loc), origins)
    key = ".".join(loc) or "configuration"
    if error["type"] == "extra_forbidden":
        known = _known_keys(loc[:-1])
        near = difflib.get_close_matches(loc[-1], known, n=1, cutoff=0.4)
        hint = f"did you mean {'.'.join([*loc[:-1], near[0]])}?" if near else f"known: {', '.join(known)}"
        return f"unknown key {key}{where}; {hint}"
    message = str(error["msg"]).removeprefix("Value error, ")
    given = error.get("input")
    hidden = isinstance(given, dict | BaseModel) or not _MAY_HOLD_SECRETS.isdisjoint(loc)
    shown = "" if hidden else f" (got {redact_url(repr(given))})"
    return f"{key}{where}: {message}{shown}"


def _origin(loc: tuple[str, ...], origins: Mapping[tuple[str, ...], str]) -> str:
    """Which variable or option set the key at `loc`, something above it or something inside it; "" for a file."""
    for path, where in reversed(list(origins.items())):
        shared = min(len(path), len(loc))
        if shared and path[:shared] == loc[:shared]:
            return f" ({where})"
    return ""


def _known_keys(path: list[str]) -> list[str]:
    model: Any = RunConfig
    for part in path:
        if part in getattr(model, "model_fields", {}):
            model = model.model_fields[part].annotation
        elif getattr(model, "__args__", None):  # dict[str, Section]
            model = model.__args__[-1]
    if getattr(model, "__args__", None):
        model = model.__args__[-1]
    return sorted(getattr(model, "model_fields", {}))


def _redact(node: Any) -> None:
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("url", "weights_url") and isinstance(value, str):
                node[key] = redact_url(value)
            else:
                _redact(value)


def _toml_table(node: dict[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    scalars = {k: v for k, v in node.items() if not isinstance(v, dict)}
    tables = {k: v for k, v in node.items() if isinstance(v, dict)}
    if path and (scalars or not tables):
        lines.extend(["", f"[{'.'.join(map(_toml_key, path))}]"])
    lines.extend(f"{_toml_key(key)} = {_toml_value(value)}" for key, value in scalars.items())
    for key, value in tables.items():
        _toml_table(value, (*path, key), lines)


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.match(key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, str):  # a JSON string is a TOML string, but for DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
