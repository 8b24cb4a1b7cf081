"""Publishing in the background, from one and several shares: what reaches the channel, whatever fails on the way."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anabranch.learner import housekeeper
from anabranch.learner.weight_publisher import WeightPublisher
from anabranch.schemas.errors import (
    BackpressureError,
    ConfigError,
    DeadlineError,
    ManifestError,
    StreamUnavailableError,
)
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_weight_channel import MemoryWeightChannel
from anabranch.transport.memory_world import MemoryWorld
from anabranch.transport.signing import Verifier, load_signer, write_key_pair
from anabranch.transport.weight_path import cheapest_path, path_bytes
from tests.publishers import Gate, Ranks, State, apply, change, copy, digest_of, hub_of, random_state

LAYOUT = Layout.build([("a", "bf16", (3000,)), ("b", "f32", (500,)), ("c", "bf16", (70, 7)), ("d", "u8", (33,))])


class Lab:
    """A world, the learner's state, and what it was at every version."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.world = MemoryWorld()
        self.state = random_state(LAYOUT, self.rng)
        self.states: dict[int, State] = {}

    def ranks(self, **config: Any) -> Ranks:
        return Ranks(self.world, LAYOUT, self.state, **config)

    def step(self, density: float = 0.05) -> None:
        change(self.state, self.rng, density)

    def note(self, ranks: Ranks) -> None:
        self.states[ranks.version] = copy(self.state)


@pytest.fixture
def lab() -> Lab:
    return Lab()


class Blobs:
    """The channel's blob store, with `before` called before every put."""

    def __init__(self, inner: Any, before: Callable[[bytes], object]) -> None:
        self._inner, self._before = inner, before

    def put(self, payload: bytes) -> str:
        self._before(payload)
        return self._inner.put(payload)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Channel(MemoryWeightChannel):
    """Fails or waits where it is told to."""

    before_put: Callable[[bytes], object] = staticmethod(lambda payload: None)
    before_commit: Callable[[Manifest], object] = staticmethod(lambda manifest: None)
    after_commit: Callable[[Manifest], object] = staticmethod(lambda manifest: None)

    @property
    def blobs(self) -> Any:
        return Blobs(super().blobs, self.before_put)

    def commit(self, manifest: Manifest) -> None:
        self.before_commit(manifest)
        super().commit(manifest)
        self.after_commit(manifest)


def connect_to(world: MemoryWorld, **hooks: Any) -> Callable[[], Any]:
    def connect() -> Any:
        channel = Channel(world.weights)
        for name, hook in hooks.items():
            setattr(channel, name, hook)
        return hub_of(world, channel)

    return connect


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
    with lab.ranks(connect=connect_to(lab.world, before_put=fails), connect_deadline_s=0.2) as ranks:
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

    with lab.ranks(connect=connect_to(lab.world, before_put=refuse), connect_deadline_s=0.2, world_size=2) as ranks:
        ranks.open()
        for _ in range(4):
            lab.step()
            ranks.publish()
        ranks.drain()
        assert Counter(e.label for e in lab.world.channel().index()) == {"anchor": 1, "delta": 4}


def test_a_rank_that_is_gone_is_named(lab: Lab) -> None:
    with lab.ranks(world_size=3, connect_deadline_s=0.2, missing=[1]) as ranks:
        with pytest.raises(DeadlineError, match=r"waiting for rank 1 of the learner to store the share of opening"):
            ranks.open()
        assert lab.world.channel().head() is None


def test_a_rank_that_dies_in_mid_run_leaves_the_head_where_it_was(lab: Lab) -> None:
    with lab.ranks(world_size=2, connect_deadline_s=0.2) as ranks:
        ranks.open()
        lab.step()
        ranks.publish()
        ranks.publishers.pop().close()
        lab.step()
        ranks.hand_over()
        with pytest.raises(DeadlineError, match=r"rank 1 of the learner to store the share of delta e1\.v2"):
            ranks.lead.flush()
        assert lab.world.channel().head() == PolicyVersion(1, 1)


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
    budget = 40_000
    channel = lab.world.channel()
    with lab.ranks(retain_bytes=budget, skip_levels=2) as ranks:
        ranks.open()
        for _ in range(60):
            lab.step(0.1)
            ranks.publish()
            ranks.drain()
        entries = channel.index()
        assert path_bytes(entries) <= budget
        assert cheapest_path(entries, None, PolicyVersion(1, 60))
        assert min(e.policy.version for e in entries) > 10


def test_too_little_memory_for_skips_leaves_them_out(lab: Lab) -> None:
    with lab.ranks(skip_memory_bytes=0, world_size=2) as ranks:
        ranks.open()
        for _ in range(8):
            lab.step()
            ranks.publish()
        ranks.drain()
        assert {e.label for e in lab.world.channel().index()} <= {"anchor", "delta"}
        assert lab.world.channel().head() == PolicyVersion(1, 8)


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


def test_rank_0_signs_no_share_that_another_key_has_signed(lab: Lab, tmp_path: Path) -> None:
    for name in ("ours.pem", "theirs.pem"):
        write_key_pair(tmp_path / name)
    ranks = lab.ranks(signing_key_file=tmp_path / "ours.pem", world_size=2)
    ranks.publishers[1]._signer = load_signer(tmp_path / "theirs.pem")
    with ranks, pytest.raises(ManifestError, match=r"opening e1\.v0 .* not in channel\.trusted_keys"):
        ranks.open()
    assert lab.world.channel().head() is None


def test_permits_follow_the_commit(lab: Lab) -> None:
    order: list[tuple[str, int]] = []
    connect = connect_to(lab.world, after_commit=lambda m: order.append((m.label, m.version)))
    with lab.ranks(
        connect=connect, skip_levels=0, on_committed=lambda hub, version: order.append(("permits", version))
    ) as ranks:
        ranks.open()
        for _ in range(2):
            lab.step()
            ranks.publish()
    assert order == [("anchor", 0), ("delta", 1), ("permits", 1), ("delta", 2), ("permits", 2)]


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
