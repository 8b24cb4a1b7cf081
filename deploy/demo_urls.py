"""The servers of a demo that runs, for commands that look at it: addresses and passwords out of its run directory.

Invariant: a password is read from the server's own 0600 file and goes into the URL alone; nothing here prints or stores it.
Held by tests/unit/deploy/test_demo_urls.py.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from urllib.parse import quote

from anabranch.schemas.config import ENV_PREFIX
from anabranch.schemas.errors import ConfigError

MASKED = ":***@"
_PASSWORD = re.compile(r'^requirepass "?(.*?)"?$', re.MULTILINE)


def environment_of(run_directory: Path) -> dict[str, str]:
    """ANABRANCH__HUB__URL and those of the regions, for the masked URLs in `run_directory`'s config.toml.

    Raises:
        ConfigError: no demo's run directory, or its servers' passwords are gone (the demo has ended).
    """
    file = run_directory / "config.toml"
    try:
        config = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be read, so {run_directory} is no run directory: {error}") from error
    found: dict[str, str] = {}
    masked = {f"{ENV_PREFIX}HUB__URL": (config.get("hub", {}).get("url", ""), "hub")}
    for name, region in config.get("regions", {}).items():
        masked[f"{ENV_PREFIX}REGIONS__{name.upper()}__URL"] = (region.get("url", ""), f"redis-{name}")
        masked[f"{ENV_PREFIX}REGIONS__{name.upper()}__WEIGHTS_URL"] = (region.get("weights_url", ""), "hub")
    for variable, (url, server) in masked.items():
        if MASKED in url:
            found[variable] = url.replace(
                "***", quote(_password(run_directory / "redis" / server / "valkey.conf"), safe="")
            )
    return found


def _password(file: Path) -> str:
    try:
        match = _PASSWORD.search(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}): the demo's servers have ended, and it did not keep their data"
        ) from error
    if match is None:
        raise ConfigError(f"{file} names no password")
    return match[1]
