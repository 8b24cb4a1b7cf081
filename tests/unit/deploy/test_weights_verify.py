"""`weights verify`: what is right passes, and whatever is broken is found and named, all of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from anabranch.deploy.weights_verify import Findings, verify
from anabranch.kernels.delta_codec import encode_anchor, encode_delta
from anabranch.schemas.errors import ManifestError
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from tests.unit.deploy.weights_channels import LAYOUT, Made, digest_of, stepped, usual

RUN = "exp"


@pytest.fixture
def store() -> MemoryWeightStore:
    return MemoryWeightStore(RUN)


@pytest.fixture
def channel(store: MemoryWeightStore) -> MemoryWeightChannel:
    return MemoryWeightChannel(store)


@pytest.fixture
def made(channel: MemoryWeightChannel) -> Made:
    return usual(channel, RUN)


def accept(manifest: Manifest) -> None:
    pass


def check(made: Made, *, first: PolicyVersion | None = None, last: PolicyVersion | None = None, **more) -> Findings:
    wanted = [e for e in made.channel.index() if (not first or e.policy >= first) and (not last or e.policy <= last)]
    return verify(made.channel, wanted, **{"check_signature": accept, "threads": 2, **more})


def damage(store: MemoryWeightStore, policy: PolicyVersion, label: str, number: int = 0) -> str:
    """Change a byte of a chunk in the store; returns its digest."""
    manifest = Manifest.from_json(store.manifests[policy, label])
    digest = manifest.chunks[number].digest
    content = bytearray(store.blobs.chunks[digest])
    content[len(content) // 2] ^= 4
    store.blobs.chunks[digest] = bytes(content)
    return digest


def v(version: int, epoch: int = 1) -> PolicyVersion:
    return PolicyVersion(epoch, version)


def test_a_sound_channel_passes_and_every_manifest_was_decoded(made):
    told: list[int] = []
    found = check(made, advance=told.append)
    entries = made.channel.index()
    assert (found.broken, found.notes) == ([], [])
    assert found.manifests == found.decoded == len(entries) == 20
    assert sum(told) >= sum(e.payload_bytes for e in entries)


def test_each_manifest_is_fetched_once_along_an_unbroken_line(channel):
    made = Made(channel, RUN)
    made.begin()
    made.step(4)
    made.skip(v(4), 4)
    told: list[int] = []
    check(made, advance=told.append)
    assert sum(told) == sum(e.payload_bytes for e in channel.index())


def test_chunks_only_decodes_nothing(made):
    found = check(made, chunks_only=True)
    assert (found.broken, found.decoded, found.manifests) == ([], 0, 20)
    assert found.payload_bytes == sum(e.payload_bytes for e in made.channel.index())


@pytest.mark.parametrize("chunks_only", [True, False])
def test_a_damaged_and_a_missing_chunk_are_both_named(store, made, chunks_only):
    altered = damage(store, v(3), "delta")
    gone = Manifest.from_json(store.manifests[v(8), "skip4"]).chunks[0].digest
    del store.blobs.chunks[gone]
    found = check(made, chunks_only=chunks_only)
    first, second, *consequence = found.broken
    assert first.startswith("e1.v3 delta: ")
    assert altered[:16] in first
    assert "altered" in first
    assert second.startswith("e1.v8 skip4: ")
    assert gone[:16] in second
    assert consequence == ([] if chunks_only else ["without what is broken no way leads to e1.v3"])


def test_behind_a_broken_delta_the_rest_is_still_decoded(store, made):
    """v3's delta is broken; v4 is reached by the skips over it, so nothing else is lost."""
    damage(store, v(3), "delta")
    found = check(made)
    assert found.decoded == 20 - 2  # not v3's delta, nor the delta that starts from it
    assert found.notes == []


def test_every_damaged_chunk_of_a_manifest_is_named(store, made):
    digests = [damage(store, v(0), "anchor", number) for number in range(2)]
    line = check(made).broken[0]
    assert all(digest[:16] in line for digest in digests)


def test_a_broken_first_anchor_costs_what_only_it_leads_to(store, made):
    damage(store, v(0), "anchor")
    found = check(made)
    assert found.broken[0].startswith("e1.v0 anchor: ")
    assert found.broken[1] == "without what is broken no way leads to e1.v0 to e1.v5, e2.v5 to e2.v8"


def test_a_delta_that_makes_another_state_than_its_manifest_says(made):
    """Well-formed chunks, genuine by digest, signed for all we know: and yet wrong."""
    policy, base = v(9, 2), v(8, 2)
    made.states[policy] = stepped(made.states[base], 1)
    other = stepped(made.states[base], 2)
    made.commit("delta", policy, base, encode_delta(LAYOUT, made.states[base], other))
    found = check(made)
    assert found.broken[0] == (
        f"e2.v9 delta: makes a state with digest {digest_of(other)}, the manifest says {digest_of(made.states[policy])}"
    )


def test_a_skip_that_makes_another_state_is_found_without_being_applied(made):
    policy = v(8, 2)
    made.commit("skip", policy, v(6, 2), encode_delta(LAYOUT, made.states[v(6, 2)], made.states[v(7, 2)]))
    found = check(made)
    assert [line.partition(": makes")[0] for line in found.broken] == ["e2.v8 skip2"]


def test_an_anchor_that_holds_another_state_than_the_deltas_lead_to(made):
    made.commit("anchor", v(8, 2), None, encode_anchor(LAYOUT, made.states[v(7, 2)]))
    (line,) = check(made).broken
    assert line.startswith("e2.v8 anchor: chunk ")
    assert "other values" in line


def test_an_anchor_that_leaves_something_out_is_found_though_the_rest_is_right(made):
    whole = encode_anchor(LAYOUT, made.states[v(8, 2)])
    part = type(whole)(whole.chunks[:-1], whole.changed_elements, whole.changed_tensors, whole.changed_by_tensor)
    made.commit("anchor", v(8, 2), None, part)
    (line,) = check(made).broken
    assert line.startswith("e2.v8 anchor: not a full snapshot")


def test_forged_signatures_are_refused_and_their_versions_not_decoded(made):
    def no_deltas_from_6(manifest: Manifest) -> None:
        if manifest.policy == v(7):
            raise ManifestError("its signature is not one of a trusted key")

    found = check(made, check_signature=no_deltas_from_6)
    assert found.broken == [
        "e1.v7 delta: its signature is not one of a trusted key",
        "without what is broken no way leads to e1.v7",
    ]


def test_a_manifest_that_cannot_be_read_or_is_missing(store, made):
    store.manifests[v(2), "delta"] = "{"
    del store.manifests[v(4), "skip2"]
    found = check(made)
    assert [line.partition(": ")[0] for line in found.broken[:2]] == ["e1.v2 delta", "e1.v4 skip2"]
    assert "is missing" in found.broken[1]


def test_an_index_that_says_something_else_is_told(store, made):
    name = v(4), "skip2"
    entry = store.entries[name]
    store.entries[name] = type(entry)(entry.policy, entry.label, entry.base, 1, entry.chunks, entry.digest)
    assert check(made).broken == ["e1.v4 skip2: the index says something else than its manifest"]


def test_only_the_range_and_the_way_to_it_are_checked(store, made):
    damage(store, v(1), "delta")  # the skip over it leads on
    damage(store, v(8, 2), "delta")
    assert check(made, first=v(3), last=v(7, 2)).broken == []
    assert check(made, first=v(3)).broken[0].startswith("e2.v8 delta")


def test_what_retention_drops_meanwhile_is_no_fault(store, made, channel):
    """The index was read, then the manifest goes."""
    wanted = channel.index()
    before: Callable[[], list] = channel.index
    del store.manifests[v(4), "skip2"]
    reads = []

    def index(**more):
        reads.append(1)
        if len(reads) > 1:
            store.entries.pop((v(4), "skip2"), None)
        return before(**more)

    channel.index = index
    found = verify(channel, wanted, check_signature=accept)
    assert found.broken == []
    assert found.notes == ["e1.v4 skip2: dropped by retention in the meantime"]


def test_a_follower_whose_start_is_gone_is_no_fault(store, made):
    """v0's anchor and first delta have been dropped; v1 is only kept for one who serves it."""
    for name in ((v(0), "anchor"), (v(1), "delta"), (v(2), "skip2"), (v(4), "skip4")):
        del store.manifests[name], store.entries[name]
    found = check(made)
    assert found.broken == []
    assert any("no way leads from nothing" in note for note in found.notes)
    damage(store, v(2), "delta")
    assert check(made).broken[0].startswith("e1.v2 delta: ")
