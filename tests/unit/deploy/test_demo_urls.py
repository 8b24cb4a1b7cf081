"""Commands find the servers of a demo that runs by its run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.deploy.demo_urls import environment_of
from anabranch.schemas.errors import ConfigError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text(
        '[hub]\nurl = "redis://:***@127.0.0.1:7001/0"\n[regions.east]\nurl = "redis://:***@127.0.0.1:7002/0"\n'
        '[regions.west]\nurl = "redis://elsewhere:6379/0"\nweights_url = "redis://:***@127.0.0.1:7001/0"\n'
    )
    for server, password in {"hub": "pass/wörd", "redis-east": "e"}.items():
        (tmp_path / "redis" / server).mkdir(parents=True)
        (tmp_path / "redis" / server / "valkey.conf").write_text(f'port 1\nrequirepass "{password}"\n')
    return tmp_path


def test_masked_urls_get_their_passwords_and_others_are_left_alone(run: Path) -> None:
    assert environment_of(run) == {
        "ANABRANCH__HUB__URL": "redis://:pass%2Fw%C3%B6rd@127.0.0.1:7001/0",
        "ANABRANCH__REGIONS__EAST__URL": "redis://:e@127.0.0.1:7002/0",
        "ANABRANCH__REGIONS__WEST__WEIGHTS_URL": "redis://:pass%2Fw%C3%B6rd@127.0.0.1:7001/0",
    }


def test_a_demo_that_has_ended_is_named(run: Path) -> None:
    (run / "redis" / "hub" / "valkey.conf").unlink()
    with pytest.raises(ConfigError, match="servers have ended"):
        environment_of(run)


def test_another_folder_is_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run directory"):
        environment_of(tmp_path)
