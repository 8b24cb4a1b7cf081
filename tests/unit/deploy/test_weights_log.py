from __future__ import annotations

import json

import pytest

from anabranch.deploy.weights_log import HEADING, follow, json_text, read_log, text_of
from anabranch.schemas.errors import StreamUnavailableError
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from tests.unit.deploy.weights_channels import BEGAN_MS, Made, usual

NOW_MS = BEGAN_MS + 308_000


@pytest.fixture
def made() -> Made:
    return usual(MemoryWeightChannel(MemoryWeightStore("r")), "r")


def test_a_line_says_what_the_version_is(made):
    made.channel.pin(PolicyVersion(1, 8), "best")
    made.channel.lease("eu-0", PolicyVersion(1, 8), ttl_ms=60_000)
    lines = read_log(made.channel, last=100)
    assert [line.version.policy for line in lines] == sorted(made.states)
    eight = text_of(lines[8], NOW_MS)
    assert eight.endswith("5 min  delta skip2 skip4  [pinned: best; leased by eu-0]")
    entry = lines[8].version
    for part in ("e1.v8 ", f" {entry.step_bytes:,} ", f" {entry.stored_bytes:,} ", entry.digest[:12]):
        assert part in eight
    assert text_of(lines[-1], NOW_MS).endswith("delta  [head]")
    fork = text_of(lines[9], NOW_MS)
    assert fork.startswith("e2.v5 ")
    assert fork.split()[1:4] == ["0", "0.00%", "0.00%"]
    assert len(HEADING.partition("manifests")[0]) == eight.index("delta")


def test_the_newest_ones_and_those_after_a_version(made):
    assert [str(line.version.policy) for line in read_log(made.channel, last=2)] == ["e2.v7", "e2.v8"]
    after = read_log(made.channel, last=100, above=PolicyVersion(2, 6))
    assert [str(line.version.policy) for line in after] == ["e2.v7", "e2.v8"]
    assert read_log(MemoryWeightChannel(MemoryWeightStore("empty")), last=5) == []


def test_json_has_one_line_a_version(made):
    told = [json.loads(json_text(line)) for line in read_log(made.channel, last=3)]
    assert [one["version"] for one in told] == ["e2.v6", "e2.v7", "e2.v8"]
    newest = told[-1]
    assert newest["head"] is True
    assert newest["manifests"] == ["delta"]
    assert newest["pinned"] is None
    assert newest["signed_by"] is None
    assert 0 < newest["changed_elements"] < newest["total_elements"]
    assert newest["bytes"] == newest["stored_bytes"] > 0


def test_a_manifest_that_cannot_be_read_leaves_its_line_and_the_others(made):
    made.channel._store.manifests[PolicyVersion(2, 7), "delta"] = "{"
    *_, seven, eight = read_log(made.channel, last=100)
    assert seven.manifest is None
    assert text_of(seven, NOW_MS).split()[2:4] == ["-", "-"]
    assert eight.manifest is not None


def test_following_tells_each_new_version_once_and_outlives_a_hub_that_is_away(made):
    said: list[str] = []
    warned: list[str] = []
    rounds = iter(range(100))
    real = made.channel.head

    class Enough(Exception):
        pass

    def away():
        raise StreamUnavailableError("the hub is away")

    def sleep(_: float) -> None:
        number = next(rounds)
        if number == 1:
            made.step(2)
        if number == 2:
            made.channel.head = away
        if number == 4:
            made.channel.head = real
            made.step()
        if number == 6:
            raise Enough

    with pytest.raises(Enough):
        follow(
            made.channel,
            lambda line: said.append(str(line.version.policy)),
            warned.append,
            after=PolicyVersion(2, 8),
            sleep=sleep,
        )
    assert said == ["e2.v9", "e2.v10", "e2.v11"]
    assert warned == ["the hub is away; trying again"]


def test_following_begins_before_anything_is_published():
    channel = MemoryWeightChannel(MemoryWeightStore("r"))
    said: list[str] = []

    def sleep(_: float) -> None:
        if said:
            raise KeyboardInterrupt
        Made(channel, "r").begin()

    with pytest.raises(KeyboardInterrupt):
        follow(channel, lambda line: said.append(str(line.version.policy)), said.append, after=None, sleep=sleep)
    assert said == ["e1.v0"]
