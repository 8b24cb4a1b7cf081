"""The second server that contract tests run on: Debian's Redis 7.0, whose commands ours must keep to."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

VARIABLE = "ANABRANCH_TEST_REDIS"


def debian_redis(folder: Path) -> Path:
    """The program that $ANABRANCH_TEST_REDIS names, else redis-server of this machine, else the one inside redis-check-rdb
    (package redis-tools: the program is the server when it is called by that name, so `folder` gets a link). Skips the
    test where there is none."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    if found := shutil.which("redis-server"):
        return Path(found)
    if found := shutil.which("redis-check-rdb"):
        link = folder / "redis-server"
        link.symlink_to(found)
        return link
    pytest.skip(f"no Redis of this machine: install redis-tools (or redis-server), or name a program in {VARIABLE}")
