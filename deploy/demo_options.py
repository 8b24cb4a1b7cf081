"""What a demo is asked for, and the configuration that follows from it.

Invariant: preset < file < environment < --set, and the short options are --set; a demo that cannot have servers of its own for a
region is refused. Held by tests/unit/deploy/test_topology.py.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from anabranch.schemas.config import RunConfig, load_config
from anabranch.schemas.errors import ConfigError
from anabranch.transport.files import read_config_text


@dataclass(frozen=True, slots=True)
class DemoOptions:
    preset: str = "tiny"
    name: str | None = None
    steps: int | None = None
    producers: int = 1
    seed: int | None = None
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    keep_redis: bool = False


def resolve(options: DemoOptions, overrides: list[str]) -> RunConfig:
    """Preset < file < environment < --set. Raises ConfigError."""
    preset = (Path(__file__).resolve().parent / "presets" / f"{options.preset}.toml").read_text(encoding="utf-8")
    config = load_config(
        read_config_text(options.config),
        source=str(options.config or "configuration"),
        beneath=preset,
        environ=os.environ,
        overrides=overrides,
    )
    for region in config.regions:
        if region != region.lower() or "__" in region:
            raise ConfigError(f"region {region!r}: a demo's region has no capital letter and no '__' in its name")
    return config


def short_forms(options: DemoOptions) -> list[str]:
    """--name, --steps and --seed as --set; a run without a name is called after its preset and the time."""
    short = []
    if options.steps is not None:
        short.append(f"learner.steps={options.steps}")
    if options.seed is not None:
        short.append(f"run.seed={options.seed}")
    named = any(o.partition("=")[0].strip() == "run.name" for o in options.overrides)
    if options.name is not None or not named:
        name = options.name or f"{options.preset}-{time.strftime('%Y%m%d-%H%M%S')}"
        short.append(f"run.name={json.dumps(name)}")
    return short
