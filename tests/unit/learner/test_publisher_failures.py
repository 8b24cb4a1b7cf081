"""What fails on the way of a version to the channel, and what is left then: the head, and nothing that is not named."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from anabranch.learner.known_entries import KnownEntries
from anabranch.learner.share_record import DECISION, OPENING
from anabranch.learner.weight_publisher import WeightPublisher
from anabranch.schemas.errors import (
    BackpressureError,
    ConfigError,
    DeadlineError,
    DeltaError,
    ManifestError,
    StreamUnavailableError,
    TemporaryError,
)
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.signing import load_signer, write_key_pair
from anabranch.transport.weight_path import cheapest_path, path_bytes
from tests.publisher_lab import Channel, Lab, connect_to
from tests.publishers import Gate, copy, hub_of


@pytest.fixture
def lab() -> Lab:
    return Lab()


class Fails:
    """A hook that raises the first `times` times it is called for a manifest of `label` (or for a chunk)."""

    def __init__(self, times: int, label: str = "", error: type[Exception] = StreamUnavailableError) -> None:
        self.left, self.label, self.error = times, label, error
        self.seen: list[Any] = []

    def __call__(self, what: Any) -> None:
        if isinstance(what, Manifest) and what.label != self.label:
            return
        self.seen.append(what)
        if self.left:
            self.left -= 1
            raise self.error("not now")


@pytest.mark.parametrize("hook", ["before_put", "before_commit", "after_commit"])
@pytest.mark.parametrize("label", ["delta", "anchor"])
@pytest.mark.parametrize("error", [StreamUnavailableError, BackpressureError])
def test_what_fails_for_a_while_is_done_again_with_the_very_same_bytes(
    lab: Lab, hook: str, label: str, error: type[Exception]
) -> None:
    fails = Fails(2, label, error)
    with lab.ranks(connect=connect_to(lab.world, **{hook: fails})) as ranks:
        ranks.open()
        lab.step()
        ranks.publish()
        assert fails.left == 0
        assert lab.world.channel().head() == PolicyVersion(1, 1)
        if hook != "before_put":
            assert len({m.model_dump_json() for m in fails.seen[:3]}) == 1


def test_a_store_that_stays_away_fails_the_next_call_and_leaves_the_head(lab: Lab) -> None:
    fails = Fails(0)
    with lab.ranks(connect=connect_to(lab.world, before_put=fails), connect_deadline_s=1.0) as ranks:
        ranks.open()
        fails.left = 10**9
        lab.step()
        ranks.hand_over()
        with pytest.raises(DeadlineError, match=r"the blob store, to keep a chunk of \d+ bytes"):
            ranks.lead.flush()
        for call in (ranks.lead.check, ranks.hand_over, ranks.lead.drain):
            with pytest.raises(DeadlineError, match="the blob store"):
                call()
        assert lab.world.channel().head() == PolicyVersion(1, 0)


def test_a_failure_in_the_background_costs_the_skip_alone(lab: Lab) -> None:
    def refuse(payload: bytes) -> None:
        if threading.current_thread().name.startswith("background"):
            raise BackpressureError("full")

    with lab.ranks(connect=connect_to(lab.world, before_put=refuse), connect_deadline_s=1.5, world_size=2) as ranks:
        ranks.open()
        for _ in range(4):
            lab.step()
            ranks.publish()
        ranks.drain()
        assert Counter(e.label for e in lab.world.channel().index()) == {"anchor": 1, "delta": 4}


def test_a_rank_that_is_gone_is_named(lab: Lab) -> None:
    with lab.ranks(world_size=3, connect_deadline_s=1.0, missing=[1]) as ranks:
        with pytest.raises(DeadlineError, match=r"waiting for rank 1 of the learner to store the share of opening"):
            ranks.open()
        assert lab.world.channel().head() is None


def test_a_rank_that_dies_in_mid_run_leaves_the_head_where_it_was(lab: Lab) -> None:
    with lab.ranks(world_size=2, connect_deadline_s=1.0) as ranks:
        ranks.open()
        lab.step()
        ranks.publish()
        ranks.publishers.pop().close()
        lab.step()
        ranks.hand_over()
        with pytest.raises(DeadlineError, match=r"rank 1 of the learner to store the share of delta e1\.v2"):
            ranks.lead.flush()
        assert lab.world.channel().head() == PolicyVersion(1, 1)


@pytest.mark.parametrize(
    ("error", "expected"),
    [(ConfigError, ConfigError), (DeltaError, TemporaryError), (ValueError, TemporaryError)],
)
def test_why_another_rank_failed_is_told_at_once(lab: Lab, error: type[Exception], expected: type[Exception]) -> None:
    """Not after a deadline, and not that it is missing: its exit code tells whether a restart helps."""
    fails = False

    def refuse(payload: bytes) -> None:
        if fails:
            raise error("the store refuses")

    ranks = lab.ranks(world_size=2, connect_deadline_s=60.0)
    ranks.publishers[1]._connect = connect_to(lab.world, before_put=refuse)
    with ranks:
        ranks.open()
        fails = True
        lab.step()
        ranks.hand_over()
        with pytest.raises(expected, match=r"rank 1 of the learner .* delta e1\.v1: the store refuses") as raised:
            ranks.lead.flush()
        assert type(raised.value) is expected
        assert lab.world.channel().head() == PolicyVersion(1, 0)


def test_a_rank_whose_background_word_does_not_get_through_goes_on(lab: Lab) -> None:
    """The hub takes no word of skips for a while."""
    held = True

    class Deaf(Channel):
        def put_share(self, policy: PolicyVersion, label: str, rank: int, text: str) -> None:
            if held and label.startswith("skip"):
                raise StreamUnavailableError("not now")
            super().put_share(policy, label, rank, text)

    ranks = lab.ranks(world_size=2, connect_deadline_s=1.0, skip_levels=1)
    ranks.publishers[1]._connect = lambda: hub_of(lab.world, Deaf(lab.world.weights))
    with ranks:
        ranks.open()
        for _ in range(5):
            lab.step()
            ranks.publish()
        held = False
        ranks.drain()
    made = Counter(e.label for e in lab.world.channel().index())
    assert made["delta"] == 5
    assert made["skip2"] == 2


def test_what_is_given_up_leaves_nothing_on_the_hub(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither chunks of skips that are not worth their place, nor what ranks have said of manifests that are settled."""
    monkeypatch.setattr(KnownEntries, "is_worth", lambda known, skip: False)
    with lab.ranks(world_size=2, skip_levels=1) as ranks:
        ranks.open()
        for _ in range(6):
            lab.step()
            ranks.publish()
        ranks.drain()
    channel = lab.world.channel()
    manifests = channel.manifests([(e.policy, e.label) for e in channel.index()])
    assert all(m and m.kind != "skip" for m in manifests)
    assert set(lab.world.weights.blobs.chunks) == {c.digest for m in manifests if m for c in m.chunks}
    assert {label for _, label in lab.world.weights.shares} == {OPENING, DECISION}


def test_with_too_little_memory_anchors_come_all_the_same(lab: Lab) -> None:
    """The next version waits for one, when none could be made beside the steps."""
    with lab.ranks(skip_memory_bytes=0) as ranks:
        ranks.open()
        for _ in range(60):
            lab.step(0.3)
            ranks.hand_over()
        ranks.lead.flush()
        ranks.drain()
    entries = lab.world.channel().index()
    assert [e.label for e in entries].count("anchor") > 3
    path = cheapest_path(entries, None, PolicyVersion(1, 60))
    assert path
    assert path_bytes(path[1:]) <= 3 * path[0].payload_bytes


def test_a_learner_that_is_not_the_run_s_any_more_hands_out_no_permits(lab: Lab) -> None:
    """It commits, and before it gets to the permits another learner opens an epoch."""
    gate = Gate()
    advance = lab.world.permits.advance
    rank = {"batch": 2, "max_age": 1, "total": 100, "accepted": []}
    old = lab.ranks(
        connect=connect_to(lab.world, after_commit=lambda m: m.policy == PolicyVersion(1, 1) and gate.pass_through()),
        on_committed=lambda hub, policy: advance(policy.version, epoch=policy.epoch),
    )
    with old:
        old.open()
        lab.world.permits.reset(epoch=1, version=0, **rank)
        lab.step()
        old.hand_over()
        assert gate.reached.wait(20)
        lab.world.permits.reset(epoch=2, version=0, **rank)
        gate.open()
        with pytest.raises(ConfigError, match="epoch 2"):
            old.lead.flush()
    assert [p.group_index for p in lab.world.permits.take("p", max_groups=10, lease_ms=1000)] == [0, 1, 2, 3]


def test_a_learner_that_dies_between_chunks_and_commit_leaves_nothing_behind(lab: Lab) -> None:
    """Its successor begins where the checkpoint was; the version that was under way never shows."""
    gate = Gate()
    dying = lab.ranks(connect=connect_to(lab.world, before_commit=lambda m: m.version == 1 and gate.pass_through()))
    dying.open()
    before = copy(lab.state)
    lab.step()
    dying.hand_over()
    assert gate.reached.wait(20)  # the chunks are stored
    assert lab.world.channel().head() == PolicyVersion(1, 0)
    for name, bits in before.items():
        lab.state[name][:] = bits
    with lab.ranks() as successor:
        successor.open()
        gate.open()  # the dead come back: fenced
        with pytest.raises(ConfigError, match="another learner works on this run"):
            dying.lead.flush()
        lab.step()
        successor.publish()
    dying.close()
    channel = lab.world.channel()
    assert [(e.policy, e.label) for e in channel.index()] == [
        (PolicyVersion(1, 0), "anchor"), (PolicyVersion(2, 0), "fork"), (PolicyVersion(2, 1), "delta"),
    ]  # fmt: skip
    assert channel.head() == PolicyVersion(2, 1)


def test_too_little_memory_for_skips_leaves_them_out(lab: Lab) -> None:
    with lab.ranks(skip_memory_bytes=0, world_size=2) as ranks:
        ranks.open()
        for _ in range(8):
            lab.step()
            ranks.publish()
        ranks.drain()
        assert {e.label for e in lab.world.channel().index()} <= {"anchor", "delta"}
        assert lab.world.channel().head() == PolicyVersion(1, 8)


def test_rank_0_signs_no_share_that_another_key_has_signed(lab: Lab, tmp_path: Path) -> None:
    for name in ("ours.pem", "theirs.pem"):
        write_key_pair(tmp_path / name)
    ranks = lab.ranks(signing_key_file=tmp_path / "ours.pem", world_size=2)
    ranks.publishers[1]._signer = load_signer(tmp_path / "theirs.pem")
    with ranks, pytest.raises(ManifestError, match=r"opening e1\.v0 .* not in channel\.trusted_keys"):
        ranks.open()
    assert lab.world.channel().head() is None


def test_closing_ends_its_threads_whatever_they_are_at(lab: Lab) -> None:
    before = set(threading.enumerate())
    fails = Fails(0)
    ranks = lab.ranks(connect=connect_to(lab.world, before_put=fails), connect_deadline_s=60.0, codec_threads=3)
    ranks.open()
    fails.left = 10**9
    lab.step()
    ranks.hand_over()
    ranks.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) <= before
    assert isinstance(ranks.lead, WeightPublisher)


def test_a_hub_that_lost_what_it_had_taken_is_a_reason_to_start_again(lab: Lab) -> None:
    """Its last second is gone with a crash: nothing is wrong with the manifest, and a new epoch mends it."""
    with lab.ranks() as ranks:
        ranks.open()
        for _ in range(2):
            lab.step()
            ranks.publish()
        ranks.drain()
        store = lab.world.weights
        store.head = PolicyVersion(1, 1)
        for named in [named for named in store.entries if named[0] == PolicyVersion(1, 2)]:
            del store.entries[named], store.manifests[named]
        lab.step()
        with pytest.raises(TemporaryError, match=r"the hub has lost version 2, which it had taken .* new epoch"):
            ranks.publish()
