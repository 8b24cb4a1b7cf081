from __future__ import annotations

import json

import pytest

from anabranch.deploy.weights_followers import as_json, read_followers, render
from anabranch.schemas.metrics import ProducerStatus
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_boards import MemoryRunBoard
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from tests.unit.deploy.weights_channels import usual

NOW_MS = 1_700_000_000_000


@pytest.fixture
def channel() -> MemoryWeightChannel:
    channel = MemoryWeightChannel(MemoryWeightStore("r"))
    usual(channel, "r")
    return channel


@pytest.fixture
def runs(channel) -> MemoryRunBoard:
    runs = MemoryRunBoard()

    def report(name: str, policy: str, **more) -> None:
        runs.report_producer(
            name, ProducerStatus(updated_ms=0, region="eu", pid=1, state="sampling", policy=policy, **more)
        )

    report("a", "e2.v8", served_since_ms=NOW_MS - 5000, fetched_bytes=12_345_678, last_fetched_bytes=4321,
           last_path="e2.v8 delta", publish_to_serve_ms=87.4)  # fmt: skip
    report("b", "e1.v4", last_error="chunk 0123 was altered", own_weights="no shared memory here")
    report("c", "")
    channel.lease("b", PolicyVersion(1, 4), ttl_ms=60_000)
    channel.lease("silent", PolicyVersion(1, 2), ttl_ms=60_000)
    return runs


def test_a_row_for_each_producer_and_each_lease(channel, runs):
    head, followers = read_followers(channel, runs)
    assert head.policy == PolicyVersion(2, 8)
    assert [(f.name, f.behind) for f in followers] == [("a", 0), ("b", 8), ("c", None), ("silent", None)]
    a, b, c, silent = render("r", head, followers, now_ms=NOW_MS).splitlines()[3:7]
    assert a.split() == [
        "a", "e2.v8", "5", "s", "0", "12,345,678", "4,321", "87", "ms", "-", "e2.v8", "delta",
    ]  # fmt: skip
    assert b.split()[:4] == ["b", "e1.v4", "-", "8"]
    assert "e1.v4, " in b
    assert c.split()[:4] == ["c", "-", "-", "-"]
    assert "does not report" in silent
    assert "e1.v2, " in silent
    assert render("r", head, followers).endswith(
        "\n\nlast errors\nb: chunk 0123 was altered\n\na copy of the weights of its own\nb: no shared memory here"
    )


def test_behind_counts_numbers_in_one_epoch_though_retention_took_some(channel, runs):
    store = channel._store
    for name in [name for name in store.entries if name[0] in (PolicyVersion(2, 6), PolicyVersion(2, 7))]:
        del store.entries[name]
    runs.report_producer("d", ProducerStatus(updated_ms=0, region="eu", pid=1, state="", policy="e2.v5"))
    assert next(f.behind for f in read_followers(channel, runs)[1] if f.name == "d") == 3


def test_json(channel, runs):
    told = json.loads(json.dumps(as_json("r", *read_followers(channel, runs))))
    assert (told["run"], told["head"]) == ("r", "e2.v8")
    a, b, c, silent = told["followers"]
    assert (a["version"], a["versions_behind"], a["bytes_fetched"], a["path"]) == (
        "e2.v8",
        0,
        12_345_678,
        "e2.v8 delta",
    )
    assert (b["last_error"], b["lease"]["version"]) == ("chunk 0123 was altered", "e1.v4")
    assert (c["version"], c["served_since_ms"], c["versions_behind"]) == (None, None, None)
    assert silent == {
        "producer": "silent", "reports": False,
        "lease": {"version": "e1.v2", "expires_in_ms": silent["lease"]["expires_in_ms"]},
    }  # fmt: skip


def test_nobody_and_nothing():
    channel = MemoryWeightChannel(MemoryWeightStore("r"))
    text = render("r", *read_followers(channel, MemoryRunBoard()))
    assert text == "nothing is published yet for run r\n\nno producer reports, and nobody holds a lease"
