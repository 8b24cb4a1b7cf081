"""The processes of a demo, and what each is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.deploy import topology
from anabranch.deploy.demo_options import DemoOptions, resolve
from anabranch.schemas.config import load_config
from anabranch.schemas.errors import ConfigError


@pytest.mark.parametrize("preset", ["tiny", "smollm2"])
def test_presets_are_valid_and_have_two_regions(preset: str) -> None:
    assert sorted(resolve(DemoOptions(preset=preset), []).regions) == ["east", "west"]


def test_layers_of_the_demo_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[learner]\nlr = 0.25\nsteps = 7\n[sampling]\ngroup_size = 4\n")
    monkeypatch.setenv("ANABRANCH__LEARNER__STEPS", "8")
    monkeypatch.setenv("ANABRANCH__SAMPLING__GROUP_SIZE", "16")
    config = resolve(DemoOptions(config=file), ["sampling.group_size=2"])
    assert (config.learner.lr, config.learner.steps, config.sampling.group_size) == (0.25, 8, 2)
    assert config.task.dataset == resolve(DemoOptions(), []).task.dataset


def test_a_missing_config_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read --config nowhere\.toml"):
        resolve(DemoOptions(config=Path("nowhere.toml")), [])


@pytest.mark.parametrize("name", ["East", "a__b"])
def test_a_region_whose_address_no_variable_could_carry_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        resolve(DemoOptions(), [f"regions.{name}={{}}"])


def test_production_commands_with_addresses_in_the_environment_only(tmp_path: Path) -> None:
    config = resolve(DemoOptions(), [])
    servers, urls = topology.server_specs(config, tmp_path / "redis")
    clients = topology.client_specs(config, tmp_path / "config.toml", producers=2, urls=urls)
    assert [s.name for s in servers] == ["hub", "redis-east", "redis-west"]
    commands = {c.name: c.argv[5:] for c in clients}
    file = str(tmp_path / "config.toml")
    assert commands == {
        "learner": ("learn", "--config", file),
        "producer-east-1": ("produce", "--config", file, "--region", "east"),
        "producer-east-2": ("produce", "--config", file, "--region", "east"),
        "producer-west-1": ("produce", "--config", file, "--region", "west"),
        "producer-west-2": ("produce", "--config", file, "--region", "west"),
        "recorder": ("record", "--config", file),
    }
    assert [c.name for c in clients if c.completes_run] == ["learner"]
    assert max(c.stop_order for c in clients) < min(s.stop_order for s in servers)
    assert sorted(urls) == ["ANABRANCH__HUB__URL", "ANABRANCH__REGIONS__EAST__URL", "ANABRANCH__REGIONS__WEST__URL"]
    passwords = [url.split(":")[2].split("@")[0] for url in urls.values()]
    assert len(set(passwords)) == 3
    for spec in [*servers, *clients]:
        assert not any(password in word for password in passwords for word in spec.argv)
    seen = load_config(environ=clients[0].env)
    assert seen.hub.url == urls["ANABRANCH__HUB__URL"]
    assert seen.regions["west"].url == urls["ANABRANCH__REGIONS__WEST__URL"]
    assert load_config(overrides=topology.url_overrides(urls)).hub.url == seen.hub.url


def test_a_replica_of_the_hub_is_the_hub_on_one_machine(tmp_path: Path) -> None:
    config = resolve(DemoOptions(), ['regions.west.weights_url="redis://far.example:6390/0"'])
    _, urls = topology.server_specs(config, tmp_path / "redis")
    assert set(urls) >= {"ANABRANCH__HUB__URL", "ANABRANCH__REGIONS__WEST__WEIGHTS_URL"}
    assert "ANABRANCH__REGIONS__EAST__WEIGHTS_URL" not in urls
    seen = load_config(environ=urls)
    assert seen.regions["west"].weights_url == seen.hub.url
    assert seen.regions["west"].url != seen.hub.url


def test_settings_in_the_callers_environment_reach_children_only_through_the_resolved_file(tmp_path: Path) -> None:
    parent = {"PATH": "/bin", "ANABRANCH__LEARNER__LR": "1", "NOTIFY_SOCKET": "@x", "TMPDIR": "/tmp"}
    child = topology.common_environment(parent, temporary=tmp_path, cache=tmp_path / "cache")
    assert child["PATH"] == "/bin"
    assert child["TMPDIR"] == str(tmp_path)
    assert child["OMP_NUM_THREADS"] == "1"
    assert not {"ANABRANCH__LEARNER__LR", "NOTIFY_SOCKET"} & child.keys()


@pytest.mark.parametrize(
    "name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ANABRANCH_RENDEZVOUS_FILE"]
)
def test_a_demo_under_a_launcher_of_ranks_starts_a_learner_of_its_own(name: str, tmp_path: Path) -> None:
    """A learner that found RANK=1 would wait for a rank 0 that nobody started."""
    assert name not in topology.common_environment({name: "1"}, temporary=tmp_path, cache=tmp_path)


def test_the_cache_follows_the_environment() -> None:
    assert topology.cache_directory({"ANABRANCH_CACHE_DIR": "/a b/c"}) == Path("/a b/c")
    assert topology.cache_directory({"XDG_CACHE_HOME": "/x"}) == Path("/x/anabranch")
    assert topology.cache_directory({"XDG_CACHE_HOME": ""}).name == "anabranch"
