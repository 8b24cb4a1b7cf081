from __future__ import annotations

import json

import pytest

from anabranch.deploy.weights_show import as_json, read_version, render
from anabranch.schemas.errors import TemporaryError, UsageError
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from tests.unit.deploy.weights_channels import LAYOUT, usual


@pytest.fixture
def channel() -> MemoryWeightChannel:
    channel = MemoryWeightChannel(MemoryWeightStore("r"))
    usual(channel, "r")
    return channel


def judge(manifest: Manifest) -> str:
    return f"judged {manifest.label}"


def test_every_manifest_of_the_version_in_full(channel):
    channel.pin(PolicyVersion(1, 6), "why not")
    channel.lease("eu-0", PolicyVersion(1, 6), ttl_ms=60_000)
    text = render(read_version(channel, "r", "e1.v6"), judge)
    assert text.startswith("e1.v6: delta, anchor, skip2\npinned: why not\nleased by eu-0 for ")
    for label in ("delta", "anchor", "skip2"):
        assert f"\n{label}\n" in text
        assert f"judged {label}" in text
    (delta,) = channel.manifests([(PolicyVersion(1, 6), "delta")])
    for part in (
        f"base          e1.v5, digest {delta.base.digest}", f"result        e1.v6, digest {delta.result_digest}",
        f"layout        {LAYOUT.hash}", f"{delta.payload_bytes:,} bytes", "base          none",
        f"chunks        {len(delta.chunks)}, smallest", "learner step  6", "2023-11-14 22:13:26.000 UTC",
    ):  # fmt: skip
        assert part in text
    assert text.partition("path from nothing\n")[2].splitlines()[1].startswith("nothing -> e1.v6")


def test_a_fork_has_no_chunks_and_the_head_is_named(channel):
    fork = render(read_version(channel, "r", "e2.v5"), judge)
    assert "chunks        none" in fork
    assert "base          e1.v5" in fork
    assert "run           r, epoch 2, which began at version 5" in fork
    assert render(read_version(channel, "r", "head"), judge).startswith("e2.v8, the head: delta")


def test_json_holds_the_manifests_as_they_are(channel):
    told = json.loads(json.dumps(as_json(read_version(channel, "r", "8"), judge)))
    (one,) = told["manifests"]
    manifest = Manifest.from_json(json.dumps(one["manifest"]))
    assert [manifest] == channel.manifests([(PolicyVersion(2, 8), "delta")])
    assert one["signature_check"] == "judged delta"
    assert told["path_from_nothing"][-1]["to"] == "e2.v8"


def test_what_cannot_be_read_or_reached_is_told(channel):
    store = channel._store
    del store.manifests[PolicyVersion(1, 2), "skip2"]
    store.manifests[PolicyVersion(1, 2), "delta"] = "{"
    for name in ((PolicyVersion(1, 0), "anchor"),):
        del store.manifests[name], store.entries[name]
    shown = read_version(channel, "r", "e1.v2")
    text = render(shown, judge)
    assert "delta: UNREADABLE: " in text
    assert "skip2: UNREADABLE: it is in the index, but not on the channel" in text
    assert "none: only followers that serve an older version get there" in text
    told = as_json(shown, judge)
    assert told["path_from_nothing"] is None
    assert all("unreadable" in one for one in told["manifests"])


def test_what_is_not_there(channel):
    with pytest.raises(UsageError, match=r"e2.v1 is not on the channel"):
        read_version(channel, "r", "1")
    with pytest.raises(TemporaryError, match="nothing is published yet for run r"):
        read_version(MemoryWeightChannel(MemoryWeightStore("r")), "r", "head")
