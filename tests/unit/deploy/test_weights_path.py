from __future__ import annotations

import dataclasses
import json

import pytest

from anabranch.deploy.weights_path import as_json, find_paths, render, step_lines
from anabranch.schemas.errors import UsageError
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from anabranch.transport.weight_path import path_bytes
from tests.unit.deploy.weights_channels import usual


@pytest.fixture
def channel() -> MemoryWeightChannel:
    channel = MemoryWeightChannel(MemoryWeightStore("r"))
    usual(channel, "r")
    return channel


def labels(way) -> list[str]:
    return [f"{e.policy} {e.label}" for e in way]


def test_a_skip_is_taken_and_compared_with_the_chain_and_a_fresh_start(channel):
    paths = find_paths(channel, "r", "e1.v4", "e1.v8")
    assert labels(paths.taken) == ["e1.v8 skip4"]
    assert labels(paths.chain) == [f"e1.v{n} delta" for n in (5, 6, 7, 8)]
    assert labels(paths.fresh)[0].endswith("anchor")
    text = render(paths)
    assert "e1.v4 -> e1.v8" in text
    assert f"{path_bytes(paths.taken):,}  1 fetch, " in text
    chain = path_bytes(paths.chain)
    assert f"{chain:,}  4 fetches" in text
    assert f"{chain / path_bytes(paths.taken):.2f} times the bytes of the path" in text


def test_one_chunk_is_not_many(channel):
    (step,) = find_paths(channel, "r", "e1.v4", "e1.v8").taken
    shown = [step_lines([dataclasses.replace(step, chunks=n)])[-1] for n in (0, 1, 2)]
    assert [line.rpartition(", ")[2] for line in shown] == ["0 chunks", "1 chunk", "2 chunks"]


def test_over_a_fork_nothing_is_fetched(channel):
    paths = find_paths(channel, "r", "e1.v5", "e2.v5")
    assert paths.taken == []
    assert "the same state, nothing to fetch" in render(paths)


def test_from_beyond_the_fork_the_way_leads_back_by_an_anchor(channel):
    taken = find_paths(channel, "r", "e1.v8", "head").taken
    assert taken[0].label == "anchor"
    assert taken[-1].policy == PolicyVersion(2, 8)


def test_from_nothing(channel):
    paths = find_paths(channel, "r", "nothing", "e1.v2")
    assert labels(paths.taken) == ["e1.v0 anchor", "e1.v2 skip2"]
    assert labels(paths.chain) == ["e1.v0 anchor", "e1.v1 delta", "e1.v2 delta"]
    assert "nothing -> e1.v0" in render(paths)


def test_a_start_that_retention_took_can_go_on_from_what_names_it(channel):
    store = channel._store
    for name in ((PolicyVersion(1, 0), "anchor"), (PolicyVersion(1, 1), "delta")):
        del store.entries[name], store.manifests[name]
    paths = find_paths(channel, "r", "e1.v0", "e1.v4")
    assert labels(paths.taken) == ["e1.v4 skip4"]
    assert paths.chain is None
    assert paths.fresh is None
    text = render(paths)
    assert "e1.v0 is not on the channel" in text
    assert text.count("no such way on the channel") == 2
    assert "no path leads from nothing to e1.v4" in render(find_paths(channel, "r", "nothing", "e1.v4"))


def test_json_says_the_same(channel):
    told = json.loads(json.dumps(as_json(find_paths(channel, "r", "e1.v4", "e1.v8"))))
    assert (told["from"], told["to"], told["path"]["fetches"], told["chain_of_deltas"]["fetches"]) == (
        "e1.v4",
        "e1.v8",
        1,
        4,
    )
    (step,) = told["path"]["steps"]
    assert (step["from"], step["to"], step["label"]) == ("e1.v4", "e1.v8", "skip4")
    assert step["bytes"] == told["path"]["bytes"]
    assert as_json(find_paths(channel, "r", "nothing", "e1.v4"))["from"] is None


def test_an_unknown_goal_is_refused(channel):
    with pytest.raises(UsageError, match=r"e1.v99 is not on the channel"):
        find_paths(channel, "r", "nothing", "e1.v99")
    with pytest.raises(UsageError, match="names no version"):
        find_paths(channel, "r", "somewhere", "head")
