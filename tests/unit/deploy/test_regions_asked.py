from __future__ import annotations

import threading

import pytest

from anabranch.deploy.regions_asked import LOOK_DEADLINE_S, ask_regions, impatient, regions_of
from anabranch.schemas.config import load_config
from anabranch.schemas.errors import BackpressureError, ConfigError, StreamUnavailableError, UsageError


def test_regions_are_asked_at_the_same_time_and_those_away_are_told():
    both = threading.Barrier(2, timeout=20)

    def ask(region: str) -> int:
        if region == "north":
            raise StreamUnavailableError("no answer from north")
        both.wait()  # passes only when two are in here
        return len(region)

    asked = ask_regions(["east", "north", "west"], ask)
    assert asked.answers == {"east": 4, "west": 4}
    with pytest.raises(StreamUnavailableError, match="no answer from north"):
        asked.end()


def test_all_reasons_are_told_and_a_single_one_keeps_its_kind():
    def away(region: str) -> None:
        raise StreamUnavailableError(f"{region} is away")

    def full(region: str) -> None:
        raise BackpressureError(f"{region} is full")

    with pytest.raises(StreamUnavailableError, match="a is away; b is away"):
        ask_regions(["a", "b"], away).end()
    with pytest.raises(BackpressureError, match="a is full"):
        ask_regions(["a"], full).end()
    ask_regions([], away).end()


def test_anything_else_is_raised():
    def refused(region: str) -> None:
        raise ConfigError("the password is wrong")

    with pytest.raises(ConfigError, match="the password is wrong"):
        ask_regions(["a"], refused)


def test_regions_by_name():
    config = load_config('[regions.west]\nurl = "redis://h:1"\n[regions.east]\nurl = "redis://h:2"\n')
    assert regions_of(config, None) == ["east", "west"]
    assert regions_of(config, "west") == ["west"]
    with pytest.raises(UsageError, match="--region mars: the configuration has east, west"):
        regions_of(config, "mars")


@pytest.mark.parametrize(("configured", "waits"), [(60.0, LOOK_DEADLINE_S), (1.0, 1.0)])
def test_a_person_does_not_wait_as_long_as_a_process(configured, waits):
    config = load_config(f"[channel]\nconnect_deadline_s = {configured}\n")
    assert impatient(config).channel.connect_deadline_s == waits
