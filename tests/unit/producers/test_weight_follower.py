"""The follower stages exactly what the publisher committed, by the cheaper path, and survives whatever is broken."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from anabranch.learner.weight_publisher import WeightPublisher
from anabranch.producers.mirror import Mirror
from anabranch.producers.weight_follower import Staged, WeightFollower
from anabranch.producers.weight_plan import plan_path
from anabranch.schemas.config import ChannelSection
from anabranch.schemas.errors import DeltaError, ManifestError, ModelMismatchError
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore

LAYOUT = Layout.build([("embed", "bf16", (40, 8)), ("norm", "f32", (8,)), ("w", "bf16", (200, 50))])
RUN = "r"


def random_state(rng: np.random.Generator) -> dict[str, Any]:
    return {
        t.name: rng.integers(0, 2**16, t.numel).astype(np.uint16 if t.dtype == "bf16" else np.uint32)
        for t in LAYOUT.tensors
    }


def stepped(state: dict[str, Any], rng: np.random.Generator, density: float = 0.01) -> dict[str, Any]:
    new = {name: bits.copy() for name, bits in state.items()}
    for bits in new.values():
        where = rng.random(bits.size) < density
        bits[where] += 1
    return new


class World:
    def __init__(self, **channel: Any) -> None:
        self.store = MemoryWeightStore(RUN)
        self.rng = np.random.default_rng(0)
        self.state = random_state(self.rng)
        self.config = ChannelSection(**channel)
        self.version = 0
        self.mirror = Mirror(LAYOUT)
        self.follower = self.follower_at(self.mirror)
        self.open(0)

    def channel(self) -> MemoryWeightChannel:
        return MemoryWeightChannel(self.store)

    def follower_at(self, mirror: Mirror) -> WeightFollower:
        return WeightFollower(self.channel(), mirror, run=RUN, poll_ms=5)

    def open(self, version: int) -> None:
        channel = self.channel()
        self.epoch, self.version = channel.open_epoch(), version
        self.publisher = WeightPublisher(channel, LAYOUT, self.config, run=RUN, epoch=self.epoch, fork_version=version)
        self.publisher.open(self.state, step=version)

    def publish(self, density: float = 0.01) -> None:
        self.state = stepped(self.state, self.rng, density)
        self.version += 1
        self.publisher.publish(self.state, self.version, step=self.version)

    def follow(self) -> Staged:
        assert self.follower.poll_once()
        staged = self.follower.staged()
        assert staged is not None
        self.follower.confirm(staged)
        return staged

    def assert_mirrored(self) -> None:
        for name, bits in self.state.items():
            assert np.array_equal(self.mirror.tensor_bits(name), bits), name
        assert self.mirror.digest() == self.publisher.digest


@pytest.fixture
def world() -> World:
    return World()


def test_anchor_then_deltas(world: World) -> None:
    assert set(world.follow().changed) == {"embed", "norm", "w"}
    world.assert_mirrored()
    for _ in range(3):
        world.publish()
        staged = world.follow()
        assert staged.path == (f"delta e1.v{world.version}",)
        world.assert_mirrored()
    assert not world.follower.poll_once(), "nothing new at the head"


def test_changed_names_exactly_the_changed_elements_over_several_deltas(world: World) -> None:
    world.follow()
    before = {n: b.copy() for n, b in world.state.items()}
    for _ in range(4):
        world.publish(0.002)
    changed = world.follow().changed
    for name, bits in world.state.items():
        indices = changed.get(name, np.empty(0, np.int64))
        assert indices is not None
        assert set(np.flatnonzero(bits != before[name])) <= set(indices.tolist())
    world.assert_mirrored()


def test_equal_weights_publish_an_empty_delta_and_still_move_the_version(world: World) -> None:
    world.follow()
    world.publish(density=0.0)
    staged = world.follow()
    assert (staged.policy, staged.fetched_bytes, staged.changed) == (PolicyVersion(1, 1), 0, {})


def test_a_late_joiner_takes_the_newest_anchor(world: World) -> None:
    world = World(anchor_every=4)
    for _ in range(6):
        world.publish()
    assert world.follow().path == ("anchor e1.v4", "delta e1.v5", "delta e1.v6")
    world.assert_mirrored()


def test_dense_deltas_lose_against_an_anchor() -> None:
    world = World(anchor_every=30)
    world.follow()
    for _ in range(30):
        world.publish(density=0.9)
    assert world.follow().path == ("anchor e1.v30",)
    world.assert_mirrored()


def test_a_new_epoch_goes_by_its_anchor_even_to_a_lower_version(world: World) -> None:
    for _ in range(5):
        world.publish()
    world.follow()
    world.state = random_state(world.rng)  # the learner resumed from an older checkpoint
    world.open(2)
    staged = world.follow()
    assert (staged.path, staged.policy) == (("anchor e2.v2",), PolicyVersion(2, 2))
    world.assert_mirrored()
    world.publish()
    assert world.follow().path == ("delta e2.v3",)


def test_a_pruned_chain_goes_by_the_anchor() -> None:
    world = World(anchor_every=10, keep_versions=2)
    world.follow()
    for _ in range(13):
        world.publish()
    assert world.follow().path[0] == "anchor e1.v10"
    world.assert_mirrored()


def test_a_broken_chunk_leaves_the_mirror_alone_and_is_retried(world: World) -> None:
    world.follow()
    confirmed = world.mirror.digest()
    world.publish()
    manifest = world.channel().manifest(PolicyVersion(1, 1), "delta")
    assert manifest is not None
    digest = manifest.chunks[0].digest
    good = world.store.blobs[digest]
    world.store.blobs[digest] = good[:-1] + bytes([good[-1] ^ 1])
    with pytest.raises(DeltaError):
        world.follower.poll_once()
    assert world.mirror.digest() == confirmed
    world.store.blobs[digest] = good
    world.follow()
    world.assert_mirrored()


def test_a_wrong_result_digest_is_never_offered_and_the_anchor_repairs_the_mirror(world: World) -> None:
    world.follow()
    world.publish()
    real = world.channel().manifest(PolicyVersion(1, 1), "delta")
    assert real is not None
    forged = real.model_copy(update={"result_digest": "0" * 32})
    key = next(k for k in world.store.manifests if world.store.manifests[k] == real.model_dump_json())
    world.store.manifests[key] = forged.model_dump_json()
    with pytest.raises(DeltaError, match="manifest says"):
        world.follower.poll_once()
    assert world.follower.staged() is None
    world.store.manifests[key] = real.model_dump_json()
    staged = world.follow()
    assert staged.path == ("anchor e1.v0", "delta e1.v1")
    assert all(indices is None for indices in staged.changed.values()), "everything is written anew"
    world.assert_mirrored()


def test_a_rejected_update_is_offered_again_with_the_next(world: World) -> None:
    world.follow()
    base = {n: b.copy() for n, b in world.state.items()}
    world.publish()
    assert world.follower.poll_once()
    staged = world.follower.staged()
    assert staged is not None
    world.follower.reject(staged, "engine says no")
    assert world.follower.last_error == "engine says no"
    world.publish()
    changed = world.follow().changed
    for name, bits in world.state.items():
        differing = set(np.flatnonzero(bits != base[name]).tolist())
        offered = changed.get(name, np.empty(0, np.int64))
        assert offered is None or differing <= set(offered.tolist())


def test_an_unconfirmed_offer_holds_the_mirror_still(world: World) -> None:
    world.follower.start()
    try:
        deadline = time.monotonic() + 10
        while world.follower.staged(wait_s=0.1) is None:
            assert time.monotonic() < deadline
        digest = world.mirror.digest()
        world.publish()
        time.sleep(0.1)
        assert world.mirror.digest() == digest
        staged = world.follower.staged()
        assert staged is not None
        world.follower.confirm(staged)
        while (staged := world.follower.staged(wait_s=0.1)) is None:
            assert time.monotonic() < deadline
        assert staged.policy == PolicyVersion(1, 1)
    finally:
        world.follower.close()


def test_another_models_weights_end_the_producer(world: World) -> None:
    follower = world.follower_at(Mirror(Layout.build([("other", "bf16", (4,))])))
    follower.start()
    try:
        with pytest.raises(ModelMismatchError, match=r"model\.path"):
            follower.staged(wait_s=10)
    finally:
        follower.close()


def test_a_mistake_in_the_thread_ends_the_process_and_not_only_the_thread(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the producer would serve one version for ever and look alive."""

    def broken() -> PolicyVersion:
        raise KeyError("a bug")

    channel = world.channel()
    monkeypatch.setattr(channel, "head", broken)
    follower = WeightFollower(channel, world.mirror, run=RUN, poll_ms=5)
    follower.start()
    try:
        with pytest.raises(KeyError, match="a bug"):
            follower.staged(wait_s=10)
        assert "a bug" in follower.last_error
    finally:
        follower.close()


@pytest.mark.parametrize(
    "forgery", [{"run": "another"}, {"codec": "unknown/9"}, {"base_digest": "1" * 32}], ids=lambda f: next(iter(f))
)
def test_a_manifest_that_does_not_fit_is_refused_by_the_plan(world: World, forgery: dict[str, str]) -> None:
    world.publish()
    channel = world.channel()
    key = next(k for k, v in world.store.manifests.items() if Manifest.from_json(v).kind == "delta")
    manifest = Manifest.from_json(world.store.manifests[key])
    world.store.manifests[key] = manifest.model_copy(update=forgery).model_dump_json()
    anchor = channel.newest_anchor(1, 1)
    assert anchor is not None
    with pytest.raises(ManifestError):
        plan_path(
            channel,
            run=RUN,
            layout_hash=LAYOUT.hash,
            have=(anchor.policy, anchor.result_digest),
            head=PolicyVersion(1, 1),
        )
