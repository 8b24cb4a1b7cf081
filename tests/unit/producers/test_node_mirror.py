"""The node's mirror: what it refuses, what a death in the middle of an update leaves, and what producers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anabranch.kernels.delta_codec import TensorChange, decode
from anabranch.producers.mirror import map_shared
from anabranch.producers.mirror_memory import MirrorMemory, MirrorState
from anabranch.producers.mirror_sums import MirrorSums
from anabranch.producers.node_mirror import NodeMirror, open_node_mirror
from anabranch.schemas.errors import DeadlineError, DeltaError
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from tests.weights import LAYOUT, Publisher, digest_of

RUN = "r"


class Crash(BaseException):
    """Stands for kill -9: nothing catches it."""


class World:
    def __init__(self, node_dir: Path) -> None:
        self.node_dir = node_dir
        self.publisher = Publisher(MemoryWeightChannel(MemoryWeightStore(RUN)))
        self.publisher.open()
        self._opened: list[NodeMirror] = []
        self.mirror = self.another()

    def another(self, layout: Layout = LAYOUT, run: str = RUN) -> NodeMirror:
        self._opened.append(open_node_mirror(layout, run=run, node_dir=self.node_dir))
        return self._opened[-1]

    def chunks(self, manifest: Manifest) -> list[bytes]:
        return [self.publisher.channel.blobs.get(c.digest, c.size_bytes) for c in manifest.chunks]

    def rebuild(self, mirror: NodeMirror | None = None) -> Manifest:
        mirror = mirror or self.mirror
        manifest = self.publisher.anchor()
        mirror.rebuild(manifest, self.chunks(manifest), path=("anchor",), path_bytes=1)
        return manifest

    def changes(self, manifest: Manifest) -> list[TensorChange]:
        return decode(LAYOUT, self.chunks(manifest), self.mirror.bits)

    def step(self, mirror: NodeMirror | None = None, density: float = 0.01) -> Manifest:
        manifest = self.publisher.step(density)
        (mirror or self.mirror).advance(manifest, self.changes(manifest), path=("delta",), path_bytes=2)
        return manifest

    def assert_holds_head(self, mirror: NodeMirror | None = None) -> None:
        mirror = mirror or self.mirror
        content = mirror.content()
        assert content is not None
        assert content.policy == self.publisher.head
        assert content.digest == mirror.digest() == self.publisher.digest
        assert_sums_are_those_of_the_bits(mirror)

    def close(self) -> None:
        for mirror in self._opened:
            mirror.close()


def assert_sums_are_those_of_the_bits(mirror: NodeMirror) -> None:
    sums = MirrorSums(mirror.layout, mirror._memory, mirror.bits, mirror.workers)
    assert sums.digest({}) == mirror.digest()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "node")
    yield made
    made.close()


def test_a_new_mirror_holds_nothing(world: World) -> None:
    assert (world.mirror.state, world.mirror.content(), world.mirror.alone) == (MirrorState.EMPTY, None, "")


@pytest.mark.parametrize("density", [0.0, 0.001, 0.05, 0.9])
def test_a_snapshot_and_updates_leave_exactly_the_published_bits(world: World, density: float) -> None:
    world.rebuild()
    world.assert_holds_head()
    for _ in range(3):
        world.step(density=density)
        world.assert_holds_head()
    for name, bits in world.publisher.state.items():
        assert np.array_equal(world.mirror.tensor_bits(name), bits)
    assert np.array_equal(map_shared(world.mirror.path, LAYOUT.mirror_bytes), world.mirror.image)


def refused(world: World, act: Callable[[], object], reason: str) -> None:
    """`act` raises a DeltaError and changes neither bits nor what the mirror says."""
    image, content = world.mirror.image.copy(), world.mirror.content()
    with pytest.raises(DeltaError, match=reason):
        act()
    assert np.array_equal(world.mirror.image, image)
    assert world.mirror.content() == content
    assert_sums_are_those_of_the_bits(world.mirror)


def test_an_update_of_another_base_is_refused_before_a_byte_is_written(world: World) -> None:
    world.rebuild()
    world.publisher.step()
    later = world.publisher.step()
    changes = world.changes(later)
    refused(world, lambda: world.mirror.advance(later, changes, path=(), path_bytes=0), "go on from")


def test_an_update_with_another_result_is_refused_before_a_byte_is_written(world: World) -> None:
    world.rebuild()
    manifest = world.publisher.step()
    changes = world.changes(manifest)[:-1]
    refused(world, lambda: world.mirror.advance(manifest, changes, path=(), path_bytes=0), "would result")


@pytest.mark.parametrize(
    "change",
    [
        TensorChange("w", np.array([10_000]), np.zeros(1, np.uint16)),
        TensorChange("w", np.array([-1]), np.zeros(1, np.uint16)),
        TensorChange("w", np.array([1]), np.zeros(1, np.uint32)),
        TensorChange("w", None, np.zeros(2, np.uint16), 9_999),
    ],
)
def test_a_change_outside_its_tensor_is_refused_before_a_byte_is_written(world: World, change: TensorChange) -> None:
    world.rebuild()
    manifest = world.publisher.step()
    changes = [*world.changes(manifest), change]
    refused(world, lambda: world.mirror.advance(manifest, changes, path=(), path_bytes=0), "w: ")


def test_a_snapshot_that_lacks_a_chunk_is_refused_before_a_byte_is_written(world: World) -> None:
    manifest = world.rebuild()
    some = world.chunks(manifest)[:-1]
    refused(world, lambda: world.mirror.rebuild(manifest, some, path=(), path_bytes=0), "cover")


def test_a_snapshot_of_another_state_leaves_a_mirror_of_no_version(world: World) -> None:
    manifest = world.rebuild()
    forged = manifest.model_copy(update={"result_digest": "0" * 32})
    with pytest.raises(DeltaError, match="the manifest says 0000"):
        world.mirror.rebuild(forged, world.chunks(manifest), path=(), path_bytes=0)
    assert (world.mirror.state, world.mirror.content()) == (MirrorState.EMPTY, None)
    world.rebuild()
    world.assert_holds_head()


def test_the_same_state_under_another_name_costs_nothing(world: World) -> None:
    world.rebuild()
    before = world.mirror.content()
    assert before is not None
    world.publisher.fork(PolicyVersion(1, 0))
    fork = world.publisher.channel.manifests([(PolicyVersion(2, 0), "fork")])[0]
    assert fork is not None
    world.mirror.rename(fork, path=("fork e2.v0",))
    world.assert_holds_head()
    assert world.mirror.changed_since(before.seq, before.seq + 1) == {}
    other = fork.model_copy(update={"result_digest": "0" * 32})
    refused(world, lambda: world.mirror.rename(other, path=()), "another state")


# Death in the middle


def die(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, *, after: int = 0, do_half: bool = False) -> None:
    """Die at the call number `after` of a method; `do_half`: having done half of a scatter."""
    real, calls = getattr(owner, name), []

    def dying(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) <= after:
            return real(self, *args, **kwargs)
        if do_half:
            real(self, args[0][: len(args[0]) // 2 + 1])
        raise Crash

    monkeypatch.setattr(owner, name, dying)


@pytest.mark.parametrize(
    ("owner", "method", "do_half", "left"),
    [
        (MirrorMemory, "set_target", False, MirrorState.VALID),
        (NodeMirror, "_scatter", False, MirrorState.APPLYING),
        (NodeMirror, "_scatter", True, MirrorState.APPLYING),
        (MirrorSums, "store", False, MirrorState.APPLYING),
        (MirrorMemory, "settle", False, MirrorState.APPLYING),
    ],
    ids=["before the first byte", "before the scatter", "in the scatter", "before the sums", "before the state"],
)
def test_what_a_dead_process_left_half_written_the_next_one_finishes(
    world: World, owner: type, method: str, do_half: bool, left: MirrorState
) -> None:
    world.rebuild()
    manifest = world.publisher.step(0.05)
    changes = world.changes(manifest)
    with pytest.MonkeyPatch.context() as monkeypatch:
        die(monkeypatch, owner, method, do_half=do_half)
        with pytest.raises(Crash):
            world.mirror.advance(manifest, changes, path=("delta",), path_bytes=2)
    assert world.mirror.state is left
    successor = world.another()
    assert (successor.content() is None) == (left is not MirrorState.VALID)
    successor.recover()
    if left is MirrorState.VALID:  # it had only begun: the version before still stands
        content = successor.content()
        assert content is not None
        assert content.policy == PolicyVersion(1, 0)
        successor.advance(manifest, changes, path=("delta",), path_bytes=2)
    world.assert_holds_head(successor)
    world.step(successor)
    world.assert_holds_head(world.mirror)


def test_a_death_in_the_recovery_is_recovered_from_too(world: World) -> None:
    world.rebuild()
    manifest = world.publisher.step(0.05)
    changes = world.changes(manifest)
    for act in (lambda: world.mirror.advance(manifest, changes, path=(), path_bytes=2), world.mirror.recover):
        with pytest.MonkeyPatch.context() as monkeypatch:
            die(monkeypatch, NodeMirror, "_scatter", do_half=True)
            with pytest.raises(Crash):
                act()
    world.another().recover()
    world.assert_holds_head()


def test_a_death_in_a_snapshot_leaves_a_mirror_of_no_version(world: World) -> None:
    world.rebuild()
    world.publisher.step()
    with pytest.MonkeyPatch.context() as patch:
        die(patch, MirrorSums, "recomputed")
        patch.setattr(NodeMirror, "_empty", lambda self: None)  # nor does a dead process tidy up
        with pytest.raises(Crash):
            world.rebuild()
    assert world.mirror.state is MirrorState.REBUILDING
    successor = world.another()
    assert successor.content() is None
    successor.recover()
    assert successor.state is MirrorState.EMPTY
    world.rebuild(successor)
    world.assert_holds_head()


def test_a_record_that_does_not_give_the_announced_digest_is_not_believed(world: World) -> None:
    world.rebuild()
    manifest = world.publisher.step()
    with pytest.MonkeyPatch.context() as monkeypatch:
        die(monkeypatch, NodeMirror, "_scatter")
        with pytest.raises(Crash):
            world.mirror.advance(manifest, world.changes(manifest), path=(), path_bytes=0)
    world.mirror.image[0] ^= 1  # a stray write, anywhere
    world.mirror.recover()
    assert (world.mirror.state, world.mirror.content()) == (MirrorState.EMPTY, None)


# Sharing


def test_producers_of_a_node_see_one_image_and_one_content(world: World) -> None:
    other = world.another()
    world.rebuild()
    world.assert_holds_head(other)
    world.step(other)
    world.assert_holds_head(world.mirror)
    world.mirror.close()
    world.assert_holds_head(world.another())


@pytest.mark.parametrize(
    ("layout", "run"), [(LAYOUT, "another"), (Layout.build([("x", "u8", (4,))]), RUN)], ids=["run", "layout"]
)
def test_another_run_or_layout_shares_nothing(world: World, layout: Layout, run: str) -> None:
    world.rebuild()
    assert world.another(layout, run).state is MirrorState.EMPTY


def test_memory_of_another_run_is_not_adopted(world: World) -> None:
    control, image = (f"/proc/self/fd/{fd}" for fd in world.mirror._memory.descriptors)
    assert MirrorMemory.adopt(LAYOUT, "another", control, image) is None
    assert MirrorMemory.adopt(Layout.build([("x", "u8", (4,))]), RUN, control, image) is None
    assert MirrorMemory.adopt(LAYOUT, RUN, image, control) is None
    stranger = MirrorMemory.make(LAYOUT, RUN)
    assert MirrorMemory.adopt(LAYOUT, RUN, control, f"/proc/self/fd/{stranger.descriptors[1]}") is None
    adopted = MirrorMemory.adopt(LAYOUT, RUN, control, image)
    assert adopted is not None
    adopted.close()


def test_where_it_cannot_be_shared_a_producer_keeps_its_own_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node").chmod(0o755)
    mirror = open_node_mirror(LAYOUT, run=RUN, node_dir=tmp_path / "node")
    assert "mode 0700" in mirror.alone
    assert mirror.try_turn()
    mirror.close()


def test_one_has_the_turn_and_death_gives_it_away(world: World) -> None:
    other = world.another()
    assert world.mirror.try_turn()
    assert not other.try_turn()
    world.mirror.close()
    assert other.try_turn()


def test_a_reader_keeps_writers_out_for_a_bounded_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.producers.node_mirror.IMAGE_DEADLINE_S", 0.03)
    world.rebuild()
    other = world.another()
    assert other.hold()
    manifest = world.publisher.step()
    changes = world.changes(manifest)
    image = world.mirror.image.copy()
    with pytest.raises(DeadlineError, match=r"copy of the weights, held by process \d+"):
        world.mirror.advance(manifest, changes, path=(), path_bytes=0)
    assert np.array_equal(world.mirror.image, image)
    assert world.mirror.state is MirrorState.VALID
    other.let_go()
    world.mirror.advance(manifest, changes, path=(), path_bytes=0)
    world.assert_holds_head()


def test_who_lags_behind_learns_what_changed_or_takes_everything(world: World) -> None:
    world.rebuild()
    start = world.mirror.content()
    assert start is not None
    before = {name: bits.copy() for name, bits in world.publisher.state.items()}
    for _ in range(3):
        world.step(density=0.002)
    changed = world.mirror.changed_since(start.seq, start.seq + 3)
    for name, bits in world.publisher.state.items():
        indices = changed.get(name, np.empty(0, np.int64))
        assert indices is not None
        assert set(np.flatnonzero(bits != before[name]).tolist()) <= set(indices.tolist())
    assert world.mirror.changed_since(start.seq + 3, start.seq + 3) == {}
    everything = dict.fromkeys(LAYOUT.by_name)
    assert world.mirror.changed_since(0, start.seq + 3) == everything, "a producer that serves nothing yet"
    world.rebuild()
    now = world.mirror.content()
    assert now is not None
    assert world.mirror.changed_since(start.seq + 3, now.seq) == everything, "nobody knows what a snapshot changes"


def test_the_path_that_is_shown_stays_short(world: World) -> None:
    manifest = world.publisher.anchor()
    path = [f"delta e1.v{v}" for v in range(1000)]
    world.mirror.rebuild(manifest, world.chunks(manifest), path=path, path_bytes=7)
    content = world.mirror.content()
    assert content is not None
    assert (content.path[0], content.path[5], content.path[-1]) == ("delta e1.v0", "... 990 more", "delta e1.v999")
    assert (content.path_bytes, content.published_ms, content.digest) == (7, 1000, digest_of(world.publisher.state))
