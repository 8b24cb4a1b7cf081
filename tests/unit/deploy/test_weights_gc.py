from __future__ import annotations

import pytest

from anabranch.deploy.weights_gc import collect, delete_orphans, find_orphans, render, render_orphans
from anabranch.schemas.errors import ManifestError
from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.memory_blob_store import MemoryBlobStore
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from anabranch.transport.weight_path import cheapest_path
from anabranch.transport.weight_retention import held_bytes, retain
from tests.unit.deploy.weights_channels import Made, usual


class Clock:
    ms = 1_700_000_000_000.0

    def __call__(self) -> float:
        return self.ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def outside(clock) -> MemoryBlobStore:
    return MemoryBlobStore(clock_ms=clock)


@pytest.fixture
def made(clock, outside) -> Made:
    return usual(MemoryWeightChannel(MemoryWeightStore("r", clock_ms=clock), outside), "r")


def test_a_dry_run_says_what_a_real_one_then_does(made):
    before = made.channel.index()
    dry = collect(made.channel, 0, dry_run=True)
    assert made.channel.index() == before
    done = collect(made.channel, 0, dry_run=False)
    assert list(done.gone) == list(dry.gone) != []
    assert {k: list(v) for k, v in done.kept.items()} == {k: list(v) for k, v in dry.kept.items()}
    left = made.channel.index()
    assert sorted((e for es in done.kept.values() for e in es), key=repr) == sorted(left, key=repr)
    assert cheapest_path(left, None, PolicyVersion(2, 8)) is not None
    assert "would go" in render(dry)
    assert "went" in render(done)


def test_everything_that_stays_has_its_reason(made):
    made.channel.pin(PolicyVersion(1, 3), "why not")
    made.channel.lease("eu-0", PolicyVersion(2, 6), ttl_ms=60_000)
    made.channel.lease("us-0", PolicyVersion(2, 7), ttl_ms=60_000)
    done = collect(made.channel, 0, dry_run=True)
    why = {(e.policy, e.label): reason for reason, entries in done.kept.items() for e in entries}
    assert why[PolicyVersion(2, 8), "delta"] == "the head"
    assert why[PolicyVersion(1, 0), "anchor"] == "way of a late joiner to the head"
    assert why[PolicyVersion(1, 3), "delta"] == "pinned"
    assert list(done.kept)[:2] == ["the head", "way of a late joiner to the head"]
    assert all(e.policy < PolicyVersion(2, 6) for e in done.gone)
    text = render(done)
    left = held_bytes(made.channel.index()) - held_bytes(done.gone)
    assert f"budget 0 bytes, {left:,} counted: {left:,} bytes over it" in text


def test_the_figures_add_up_to_what_is_counted(made):
    made.channel.pin(PolicyVersion(1, 3), "why not")
    text = render(collect(made.channel, 0, dry_run=True))
    figures = [
        [int(word.replace(",", "")) for word in line[52:96].split()]
        for line in text.splitlines()
        if line.startswith("stays")
    ]
    *each, (manifests, size, counted) = figures
    assert counted == size + manifests * 16_384 > size > 0
    assert [sum(column) for column in zip(*each, strict=True)] == [manifests, size, counted]
    assert all(row[2] == row[1] + row[0] * 16_384 for row in each)
    assert "counted: bytes of chunks, and 16,384 for each manifest" in text
    assert f"budget 0 bytes, {counted:,} counted: {counted:,} bytes over it" in text


@pytest.mark.timeout(60)
def test_an_index_of_very_many_entries_is_planned_once(made):
    """What this takes grows with the index, not with its square: it would not end then."""
    store = MemoryWeightStore("r")
    for version in range(60_000):
        policy, base = PolicyVersion(1, version), PolicyVersion(1, version - 1) if version else None
        label = "delta" if version else "anchor"
        store.entries[policy, label] = IndexEntry(policy, label, base, 1000, 1, f"{version:032x}")
        if version % 100 == 99:
            store.entries[policy, "anchor"] = IndexEntry(policy, "anchor", None, 2000, 1, f"{version:032x}")
    store.head = PolicyVersion(1, 59_999)
    channel = MemoryWeightChannel(store)
    assert len(collect(channel, 0, dry_run=True).gone) > 59_000
    channel.lease("p", PolicyVersion(1, 0), ttl_ms=60_000)
    done = retain(channel, 0)
    assert ([lease.holder for lease in done.held_by], done.dropped) == (["p"], [])


def test_what_a_lease_holds_is_told_with_its_holder(made):
    made.channel.lease("eu-0", PolicyVersion(1, 0), ttl_ms=60_000)
    made.channel.lease("us-0", PolicyVersion(1, 4), ttl_ms=60_000)
    done = collect(made.channel, 0, dry_run=False)
    assert list(done.gone) == []
    reasons = {(e.policy, e.label): reason for reason, entries in done.kept.items() for e in entries}
    assert reasons[PolicyVersion(1, 3), "delta"] == "leased: eu-0 from e1.v0"
    assert reasons[PolicyVersion(1, 8), "delta"] == "leased: eu-0 from e1.v0 and 1 more"


def test_within_the_budget_nothing_goes(made):
    total = held_bytes(made.channel.index())
    done = collect(made.channel, total, dry_run=False)
    assert list(done.gone) == []
    assert "within the budget" in done.kept
    assert f"budget {total:,} bytes, {total:,} counted: kept" in render(done)


def test_dropped_chunks_are_deleted_when_their_grace_is_over(made, clock, outside):
    collect(made.channel, 0, dry_run=False)
    stored = len(outside.chunks)
    clock.ms += 3600_000
    done = collect(made.channel, 0, dry_run=False)
    assert 0 < done.chunks_deleted == stored - len(outside.chunks)
    assert f"{done.chunks_deleted} chunks that were dropped before are deleted" in render(done)


def test_orphans_are_those_that_nothing_names_and_that_are_old(made, clock, outside):
    orphan = outside.put(b"x" * 1000)
    clock.ms += 2 * 3600_000
    young = outside.put(b"young")
    found = find_orphans(made.channel)
    assert [(info.digest, info.size_bytes) for info in found] == [(orphan, 1000)]
    text = render_orphans(found, None)
    assert "1 chunks, 1,000 bytes" in text
    assert f"{orphan} " in text
    assert delete_orphans(made.channel, found) == 1
    assert orphan not in outside.chunks
    assert young in outside.chunks
    assert "orphans: none" in render_orphans(find_orphans(made.channel), 0)
    for entry in made.channel.index():
        (manifest,) = made.channel.manifests([(entry.policy, entry.label)])
        assert all(chunk.digest in outside.chunks for chunk in manifest.chunks)


def test_a_manifest_that_cannot_be_read_stops_the_search(made, clock):
    """What it names would be taken for orphans."""
    clock.ms += 2 * 3600_000
    manifests = made.channel._store.manifests
    text = manifests.pop((PolicyVersion(1, 4), "skip2"))
    with pytest.raises(ManifestError, match=r"e1.v4 skip2 is in the index but not on the channel"):
        find_orphans(made.channel)
    manifests[PolicyVersion(1, 4), "skip2"] = text[:-5]
    with pytest.raises(ManifestError):
        find_orphans(made.channel)
