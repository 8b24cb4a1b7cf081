"""Publishing in the background, from one and several shares: what reaches the channel, whatever fails on the way."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from anabranch.learner import housekeeper
from anabranch.learner.publish_order import AnchorOrder
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.signing import Verifier, write_key_pair
from anabranch.transport.weight_intact import first_broken
from anabranch.transport.weight_path import cheapest_path, path_bytes
from anabranch.transport.weight_retention import MANIFEST_BYTES, held_bytes
from tests.publisher_lab import LAYOUT, Lab, connect_to
from tests.publishers import Gate, apply, copy, digest_of


@pytest.fixture
def lab() -> Lab:
    return Lab()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shares_together_are_the_whole_state_at_every_version_by_every_way(lab: Lab, world_size: int) -> None:
    with lab.ranks(world_size=world_size, skip_levels=3) as ranks:
        ranks.open()
        lab.note(ranks)
        for _ in range(17):
            lab.step(lab.rng.choice([0.0, 0.02, 0.3]))
            manifest = ranks.publish(anchor=ranks.version == 8)
            ranks.drain()
            lab.note(ranks)
            assert manifest.result_digest == digest_of(LAYOUT, lab.state)
            assert manifest.learner_step == ranks.version
    channel = lab.world.channel()
    entries = channel.index()
    labels = Counter(e.label for e in entries)
    assert labels["delta"] == 17
    assert labels["anchor"] >= 2
    assert labels["skip2"] + labels["skip4"] + labels["skip8"] > 5
    for entry in entries:
        state = {n: np.zeros_like(b) for n, b in lab.state.items()} if entry.base is None else None
        state = copy(lab.states[entry.base.version]) if state is None else state  # type: ignore[union-attr]
        apply(channel, LAYOUT, entry, state)
        assert {n: b.tobytes() for n, b in state.items()} == {
            n: b.tobytes() for n, b in lab.states[entry.policy.version].items()
        }


def test_equal_weights_are_an_empty_delta_and_no_skip(lab: Lab) -> None:
    with lab.ranks(world_size=2) as ranks:
        ranks.open()
        for _ in range(4):
            manifest = ranks.publish()
            assert (manifest.chunks, manifest.changed_elements) == ((), 0)
        ranks.drain()
        assert {e.label for e in lab.world.channel().index()} == {"anchor", "delta"}


def test_what_is_published_is_what_the_weights_were_when_it_was_handed_over(lab: Lab) -> None:
    """Training goes on meanwhile; so does the next publish."""
    gate = Gate()
    with lab.ranks(
        connect=connect_to(lab.world, before_commit=lambda m: m.version == 1 and gate.pass_through())
    ) as ranks:
        ranks.open()
        digests = []
        for _ in range(2):
            lab.step()
            digests.append(digest_of(LAYOUT, lab.state))
            ranks.hand_over()  # returns while version 1 waits at the gate
        lab.step()
        assert gate.reached.wait(20)
        assert lab.world.channel().head() == PolicyVersion(1, 0)
        gate.open()
        ranks.lead.flush()
        names = [(PolicyVersion(1, v), "delta") for v in (1, 2)]
        assert [m.result_digest for m in lab.world.channel().manifests(names) if m] == digests


def test_a_publish_waits_for_the_snapshot_and_says_so(lab: Lab) -> None:
    gate, waits = Gate(), threading.Event()
    said: list[str] = []

    def hold(payload: bytes) -> None:
        if lab.world.weights.head is not None:
            gate.pass_through()

    def waiting(what: str) -> None:
        said.append(what)
        waits.set()
        gate.open()

    with lab.ranks(connect=connect_to(lab.world, before_put=hold)) as ranks:
        ranks.open()
        ranks.lead.waiting = waiting
        for _ in range(2):
            lab.step()
            ranks.hand_over()
        ranks.lead.flush()
        assert waits.is_set()
        assert said[0] == "the version before to be encoded and stored"
        assert lab.world.channel().head() == PolicyVersion(1, 2)


def test_skips_and_anchors_never_delay_a_step(lab: Lab) -> None:
    """Their uploads are held at a gate; steps go on being committed beside them, and they come when it opens."""
    gate = Gate()

    def hold(payload: bytes) -> None:
        if threading.current_thread().name.startswith("background"):
            gate.pass_through()

    with lab.ranks(connect=connect_to(lab.world, before_put=hold), world_size=2, skip_levels=2) as ranks:
        ranks.open()
        for _ in range(2):
            lab.step()
            ranks.publish(anchor=True)
        assert gate.reached.wait(20)
        for _ in range(3):
            lab.step()
            ranks.publish()
        made = Counter(e.label for e in lab.world.channel().index())
        assert made == {"anchor": 1, "delta": 5}
        gate.open()
        ranks.drain()
        made = Counter(e.label for e in lab.world.channel().index())
        assert made["anchor"] >= 3
        assert made["skip2"] + made["skip4"] > 0


def test_an_anchor_that_falls_due_is_ordered_once_and_never_lost(lab: Lab) -> None:
    with lab.ranks() as ranks:
        ranks.open()
        assert not ranks.lead.next_order(1).anchor
        ranks.lead._due.put(AnchorOrder.BESIDE)
        assert ranks.lead.next_order(1).anchor
        assert not ranks.lead.next_order(1).anchor


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_epoch_begins_as_a_fork_only_of_the_very_same_state(lab: Lab, world_size: int) -> None:
    with lab.ranks(world_size=2) as first:
        first.open()
        for _ in range(3):
            lab.step()
            first.publish()
            lab.note(first)
    lab.state = copy(lab.states[2])
    with lab.ranks(world_size=world_size, fork_version=2) as forked:
        forked.open()
        assert forked.lead.published is not None
        manifest = forked.lead.published.manifest
        assert (manifest.kind, manifest.chunks, manifest.learner_step) == ("fork", (), 2)
        assert manifest.base is not None
        assert manifest.base.policy == PolicyVersion(1, 2)
        lab.step()
        forked.publish()
    lab.state["a"][0] += 1
    with lab.ranks(world_size=world_size, fork_version=3) as other:
        other.open()
        assert other.lead.published is not None
        assert other.lead.published.manifest.kind == "anchor"
    path = cheapest_path(lab.world.channel().index(), None, PolicyVersion(2, 3))
    assert path is not None
    assert [e.policy.epoch for e in path][-2:] == [2, 2]


def test_an_epoch_does_not_begin_as_a_fork_of_what_cannot_be_reached_any_more(lab: Lab) -> None:
    """Retention may take the way to the checkpoint's version; who has nothing could not get to a head that is its fork."""
    with lab.ranks(skip_levels=0) as first:
        first.open()
        for version in range(1, 4):
            lab.step(0.9)
            first.publish(anchor=version == 3)
            lab.note(first)
        first.drain()
    channel = lab.world.channel()
    gone = channel.drop([e for e in channel.index() if e.policy.version == 0])
    assert [e.label for e in gone] == ["anchor"]
    lab.state = copy(lab.states[2])
    with lab.ranks(fork_version=2) as second:
        second.open()
        assert second.lead.published is not None
        assert second.lead.published.manifest.kind == "anchor"
    head = channel.head()
    assert head == PolicyVersion(2, 2)
    assert cheapest_path(channel.index(), None, head)


def test_an_epoch_does_not_begin_as_a_fork_when_a_chunk_of_the_way_is_lost(lab: Lab) -> None:
    """A newcomer could not get past it, and no step would be taken that leads to the next anchor."""
    with lab.ranks() as first:
        first.open()
        lab.step()
        first.publish()
        lab.note(first)
    channel = lab.world.channel()
    (anchor,) = channel.manifests([(PolicyVersion(1, 0), "anchor")])
    assert anchor is not None
    channel.blobs.delete([anchor.chunks[-1].digest])
    with lab.ranks(fork_version=1) as second:
        second.open()
        assert second.lead.published is not None
        assert second.lead.published.manifest.kind == "anchor"
    path = cheapest_path(channel.index(), None, PolicyVersion(2, 1))
    assert path is not None
    assert first_broken(channel, path) is None


def test_an_anchor_comes_when_the_way_to_the_head_costs_more_than_one(lab: Lab) -> None:
    channel = lab.world.channel()
    with lab.ranks(world_size=2, skip_levels=2) as ranks:
        ranks.open()
        for _ in range(60):
            lab.step(0.1)
            ranks.publish()
            ranks.drain()
            head = channel.head()
            assert head is not None
            path = cheapest_path(channel.index(), None, head)
            assert path
            # The anchor is ordered with the next version, so that it is one delta late.
            assert path_bytes(path[1:]) <= path[0].payload_bytes + 2 * path[-1].payload_bytes
    anchors = [e for e in channel.index() if e.label == "anchor"]
    assert 2 < len(anchors) < 15


def test_the_channel_stays_within_its_budget(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeper, "AGAIN_AFTER_S", 0.05)
    budget = 40_000 + 20 * MANIFEST_BYTES
    channel = lab.world.channel()
    with lab.ranks(retain_bytes=budget, skip_levels=2) as ranks:
        ranks.open()
        for _ in range(60):
            lab.step(0.1)
            ranks.publish()
            ranks.drain()
        entries = channel.index()
        assert held_bytes(entries) <= budget
        assert cheapest_path(entries, None, PolicyVersion(1, 60))
        assert min(e.policy.version for e in entries) > 10


def test_manifests_and_shares_are_signed(lab: Lab, tmp_path: Path) -> None:
    key = write_key_pair(tmp_path / "key.pem")
    with lab.ranks(signing_key_file=tmp_path / "key.pem", world_size=2) as ranks:
        ranks.open()
        lab.step()
        ranks.publish()
        lab.step()
        ranks.publish()
        ranks.drain()
    channel = lab.world.channel()
    for manifest in channel.manifests([(e.policy, e.label) for e in channel.index()]):
        assert manifest is not None
        Verifier([key]).check(manifest)


def test_permits_follow_the_commit(lab: Lab) -> None:
    order: list[tuple[str, int]] = []
    connect = connect_to(lab.world, after_commit=lambda m: order.append((m.label, m.version)))
    with lab.ranks(
        connect=connect, skip_levels=0, on_committed=lambda hub, policy: order.append(("permits", policy.version))
    ) as ranks:
        ranks.open()
        for _ in range(2):
            lab.step()
            ranks.publish()
    assert order == [("anchor", 0), ("delta", 1), ("permits", 1), ("delta", 2), ("permits", 2)]
