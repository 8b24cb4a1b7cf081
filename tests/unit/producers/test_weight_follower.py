"""The follower offers exactly what was published, by the cheapest path, and survives whatever is broken on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from anabranch.producers.mirror_memory import MirrorState
from anabranch.producers.node_mirror import NodeMirror, open_node_mirror
from anabranch.producers.node_turn import FollowerState
from anabranch.producers.weight_follower import Staged, WeightFollower
from anabranch.schemas.errors import AnabranchError, ManifestError, ModelMismatchError, StreamUnavailableError
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from anabranch.transport.signing import Signer, Verifier
from tests.weights import LAYOUT, Publisher, State, random_state

RUN = "r"


class Node:
    """One producer's follower on a node of its own, over a channel in memory."""

    def __init__(self, node_dir: Path) -> None:
        self.node_dir = node_dir
        self.store = MemoryWeightStore(RUN)
        self.publisher = Publisher(self.channel())
        self._opened: list[WeightFollower] = []
        self.follower = self.another()

    def channel(self) -> MemoryWeightChannel:
        return MemoryWeightChannel(self.store)

    def another(self, layout: Layout = LAYOUT, **options: Any) -> WeightFollower:
        """One more producer of the node."""
        mirror = open_node_mirror(layout, run=RUN, node_dir=self.node_dir)
        assert not mirror.alone
        follower = WeightFollower(self.channel(), mirror, run=RUN, poll_ms=5, **options)
        self._opened.append(follower)
        return follower

    @property
    def mirror(self) -> NodeMirror:
        return self.follower.mirror

    def follow(self, follower: WeightFollower | None = None) -> Staged:
        follower = follower or self.follower
        assert follower.poll_once()
        staged = follower.hold()
        assert staged is not None
        follower.confirm(staged)
        return staged

    def assert_mirrors_head(self) -> None:
        for name, bits in self.publisher.state.items():
            assert np.array_equal(self.mirror.tensor_bits(name), bits), name
        content = self.mirror.content()
        assert content is not None
        assert content.digest == self.mirror.digest() == self.publisher.digest
        assert content.policy == self.publisher.head

    def rewrite(self, policy: PolicyVersion, label: str, **fields: Any) -> Callable[[], None]:
        """Replace fields of a committed manifest; the returned function takes that back."""
        name = policy, label
        before = self.store.manifests[name]
        self.store.manifests[name] = Manifest.from_json(before).model_copy(update=fields).model_dump_json()
        return lambda: self.store.manifests.update({name: before})

    def close(self) -> None:
        for follower in self._opened:
            follower.close()
            follower.mirror.close()


def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """After failures. `poll_once` tries at once then."""
    monkeypatch.setattr("anabranch.producers.turn_failures.RETRY_FIRST_S", 0.0)
    monkeypatch.setattr("anabranch.producers.turn_failures.TAKEOVER_S", 0.0)
    monkeypatch.setattr("anabranch.producers.broken_manifests.PAUSE_FIRST_S", 0.0)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    no_pauses(monkeypatch)
    made = Node(tmp_path / "node")
    made.publisher.open()
    yield made
    made.close()


def changed_places(before: State, after: State) -> dict[str, set[int]]:
    return {name: set(np.flatnonzero(before[name] != bits).tolist()) for name, bits in after.items()}


def assert_covers(staged: Staged, places: dict[str, set[int]]) -> None:
    for name, at in places.items():
        offered = staged.changed.get(name, np.empty(0, np.int64))
        assert offered is None or at <= set(offered.tolist()), name


# Paths


def test_anchor_then_single_steps(node: Node) -> None:
    assert set(node.follow().changed) == {"embed", "norm", "w"}
    node.assert_mirrors_head()
    for _ in range(3):
        node.publisher.step()
        assert node.follow().path == (f"delta {node.publisher.head}",)
        node.assert_mirrors_head()
    assert not node.follower.poll_once(), "nothing new at the head"


def test_missed_versions_come_as_steps_or_as_the_skip_over_them(node: Node) -> None:
    node.follow()
    before = node.publisher.state
    for _ in range(3):
        node.publisher.step(0.002)
    staged = node.follow()
    assert staged.path == ("delta e1.v1", "delta e1.v2", "delta e1.v3")
    assert_covers(staged, changed_places(before, node.publisher.state))
    assert all(indices is not None for indices in staged.changed.values()), "only what the three steps touched"
    for _ in range(5):
        node.publisher.step()
    node.publisher.skip(4)
    assert node.follow().path == ("delta e1.v4", "skip4 e1.v8")
    node.assert_mirrors_head()


def test_a_late_joiner_takes_the_newest_anchor_and_skips_from_there(node: Node) -> None:
    for version in range(1, 11):
        node.publisher.step()
        if version == 2:
            node.publisher.anchor()
    node.publisher.merged("skip", PolicyVersion(1, 4), PolicyVersion(1, 8))
    assert node.follow().path == (
        "anchor e1.v2",
        "delta e1.v3",
        "delta e1.v4",
        "skip4 e1.v8",
        "delta e1.v9",
        "delta e1.v10",
    )
    node.assert_mirrors_head()


def test_long_absence_goes_by_an_anchor_when_that_is_cheaper(node: Node) -> None:
    node.follow()
    for _ in range(12):
        node.publisher.step(density=0.9)
    node.publisher.anchor()
    assert node.follow().path == ("anchor e1.v12",)
    node.assert_mirrors_head()


def test_a_pruned_chain_goes_by_the_anchor(node: Node) -> None:
    node.follow()
    for _ in range(4):
        node.publisher.step()
    node.publisher.anchor()
    channel = node.channel()
    channel.drop([e for e in channel.index() if e.policy <= PolicyVersion(1, 3)])
    node.publisher.step()
    assert node.follow().path == ("anchor e1.v4", "delta e1.v5")
    node.assert_mirrors_head()


def test_a_new_epoch_that_goes_on_from_the_same_state_costs_no_bytes(node: Node) -> None:
    node.publisher.step()
    node.follow()
    fetched = node.follower.fetched_bytes
    node.publisher.fork(PolicyVersion(1, 1))
    staged = node.follow()
    assert (staged.path, staged.policy) == (("fork e2.v1",), PolicyVersion(2, 1))
    assert (staged.changed, staged.fetched_bytes, node.follower.fetched_bytes) == ({}, 0, fetched)
    node.publisher.step()
    assert node.follow().path == ("delta e2.v2",)
    node.assert_mirrors_head()


def test_a_follower_ahead_of_the_fork_goes_back_by_a_path(node: Node) -> None:
    """The learner was restarted from version 2; versions 3 to 5 are of a line that was given up."""
    for _ in range(5):
        node.publisher.step()
    node.follow()
    node.publisher.fork(PolicyVersion(1, 2))
    node.publisher.step()
    staged = node.follow()
    assert staged.path == ("anchor e1.v0", "delta e1.v1", "delta e1.v2", "fork e2.v2", "delta e2.v3")
    assert staged.policy == PolicyVersion(2, 3)
    node.assert_mirrors_head()


def test_a_new_epoch_opened_by_an_anchor_may_have_a_lower_version(node: Node) -> None:
    for _ in range(5):
        node.publisher.step()
    node.follow()
    node.publisher.open(2, random_state(node.publisher.rng))
    staged = node.follow()
    assert (staged.path, staged.policy) == (("anchor e2.v2",), PolicyVersion(2, 2))
    node.assert_mirrors_head()


def test_equal_weights_cost_nothing_and_still_move_the_version(node: Node) -> None:
    node.follow()
    node.publisher.step(density=0.0)
    staged = node.follow()
    assert (staged.policy, staged.fetched_bytes, staged.changed) == (PolicyVersion(1, 1), 0, {})


# What is broken


def spoil(node: Node, manifest: Manifest, chunk: int = 0) -> Callable[[], None]:
    digest = manifest.chunks[chunk].digest
    good = node.store.blobs.chunks[digest]
    node.store.blobs.chunks[digest] = good[:-1] + bytes([good[-1] ^ 1])
    return lambda: node.store.blobs.chunks.update({digest: good})


def test_a_chunk_that_was_broken_on_the_way_is_fetched_again_alone(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.follow()
    repair = spoil(node, node.publisher.step())
    get, asked = node.store.blobs.get, []

    def repaired_after_the_first(digest: str, size_bytes: int) -> bytes:
        asked.append(digest)
        if len(asked) == 2:
            repair()
        return get(digest, size_bytes)

    monkeypatch.setattr(node.store.blobs, "get", repaired_after_the_first)
    assert node.follow().path == ("delta e1.v1",)
    assert len(set(asked)) < len(asked)
    node.assert_mirrors_head()


def test_a_step_that_stays_broken_is_gone_around_by_a_skip(node: Node) -> None:
    node.follow()
    node.publisher.step()
    spoil(node, node.publisher.step())
    node.publisher.skip(2)
    node.publisher.step()
    assert node.follow().path == ("skip2 e1.v2", "delta e1.v3")
    node.assert_mirrors_head()


def test_a_truncated_manifest_is_gone_around_too(node: Node) -> None:
    node.follow()
    node.publisher.step()
    node.publisher.step()
    name = PolicyVersion(1, 2), "delta"
    node.store.manifests[name] = node.store.manifests[name][:-40]
    with pytest.raises(ManifestError, match=r"around what is broken: delta e1.v2: not a weight manifest"):
        node.follower.poll_once()
    node.publisher.skip(2)
    assert node.follow().path == ("skip2 e1.v2",)
    node.assert_mirrors_head()


def test_a_broken_chain_is_left_for_an_anchor(node: Node) -> None:
    node.follow()
    node.publisher.step()
    spoil(node, node.publisher.step())
    node.publisher.anchor()
    node.publisher.step()
    staged = node.follow()
    assert staged.path == ("anchor e1.v2", "delta e1.v3")
    assert all(indices is None for indices in staged.changed.values()), "everything is written anew"
    node.assert_mirrors_head()


def served_digest(node: Node) -> tuple[PolicyVersion, str]:
    content = node.mirror.content()
    assert content is not None
    assert content.digest == node.mirror.digest()
    return content.policy, content.digest


@pytest.mark.parametrize(
    ("forgery", "reason"),
    [
        ({"run": "another"}, "run 'another'"),
        ({"codec": "unknown/9"}, "codec 'unknown/9'"),
        ({"layout_hash": "1" * 32}, "layout"),
        ({"result_digest": "1" * 32}, "the index says"),
        ({"learner_step": -1}, "not a weight manifest"),
        ({"kind": "anchor", "base": None}, "put there by somebody else"),
        ({"chunks": ()}, "the index says"),
        ({"full_bytes": 2**40}, "elements"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_manifest_that_does_not_fit_is_refused_before_a_byte_is_written(
    node: Node, forgery: dict[str, Any], reason: str
) -> None:
    node.follow()
    before = served_digest(node)
    node.publisher.step()
    repair = node.rewrite(PolicyVersion(1, 1), "delta", **forgery)
    with pytest.raises(AnabranchError, match=reason):
        node.follower.poll_once()
    assert served_digest(node) == before
    assert node.follower.staged() is None
    repair()
    node.follow()
    node.assert_mirrors_head()


def test_a_wrong_base_is_refused_before_a_byte_is_written(node: Node) -> None:
    node.follow()
    before = served_digest(node)
    manifest = node.publisher.step()
    assert manifest.base is not None
    node.rewrite(PolicyVersion(1, 1), "delta", base=manifest.base.model_copy(update={"digest": "2" * 32}))
    with pytest.raises(ManifestError, match="goes on from digest 2222"):
        node.follower.poll_once()
    assert served_digest(node) == before


def test_a_forged_result_digest_is_refused_before_a_byte_is_written(node: Node) -> None:
    """Index and manifest agree, but what the chunks make of the base is something else."""
    node.follow()
    before = served_digest(node)
    honest, node.publisher.sign = node.publisher.sign, lambda m: m.model_copy(update={"result_digest": "3" * 32})
    node.publisher.step()
    node.publisher.sign = honest
    with pytest.raises(ManifestError, match="would result"):
        node.follower.poll_once()
    assert served_digest(node) == before


def test_a_truncated_snapshot_is_refused_before_a_byte_is_written(node: Node) -> None:
    node.follow()
    before = served_digest(node)
    for _ in range(2):
        node.publisher.step()
    node.publisher.sign = lambda m: m.model_copy(update={"chunks": m.chunks[:1]})
    node.publisher.anchor()
    channel = node.channel()
    channel.drop([e for e in channel.index() if e.policy <= PolicyVersion(1, 1)])
    del node.store.manifests[PolicyVersion(1, 2), "delta"], node.store.entries[PolicyVersion(1, 2), "delta"]
    with pytest.raises(ManifestError, match="cover"):
        node.follower.poll_once()
    assert served_digest(node) == before


@pytest.mark.parametrize("head", [PolicyVersion(1, 1), PolicyVersion(0, 9)], ids=["older version", "older epoch"])
def test_a_stale_head_is_refused(node: Node, head: PolicyVersion) -> None:
    node.publisher.step()
    node.publisher.step()
    node.follow()
    before = served_digest(node)
    node.store.head = head
    with pytest.raises(ManifestError, match=f"head {head} is older than e1.v2"):
        node.follower.poll_once()
    assert served_digest(node) == before
    assert node.follower.staged() is None


def test_a_head_that_names_nothing_is_reported(node: Node) -> None:
    node.follow()
    node.store.head = PolicyVersion(1, 9)
    with pytest.raises(ManifestError, match=r"no path to weights e1\.v9 from e1\.v0"):
        node.follower.poll_once()


def test_only_manifests_signed_by_a_trusted_key_are_followed(node: Node) -> None:
    signer, stranger = Signer(Ed25519PrivateKey.generate()), Signer(Ed25519PrivateKey.generate())
    follower = node.another(verify=Verifier([signer.public_key]).check)
    with pytest.raises(ManifestError, match="sign"):
        follower.poll_once()
    assert node.mirror.state is MirrorState.EMPTY
    node.publisher.sign = signer.sign
    node.publisher.open(0)
    assert node.follow(follower).path == ("anchor e2.v0",)
    before = served_digest(node)
    node.publisher.sign = stranger.sign
    node.publisher.step()
    with pytest.raises(ManifestError, match=r"e2\.v1"):
        follower.poll_once()
    assert served_digest(node) == before


def test_a_version_that_is_said_to_have_the_same_state_needs_a_manifest_that_says_so(node: Node) -> None:
    """Else whoever can write the index could give weights another name."""
    signer = Signer(Ed25519PrivateKey.generate())
    node.publisher.sign = signer.sign
    node.publisher.open(0)
    follower = node.another(verify=Verifier([signer.public_key]).check)
    node.follow(follower)
    node.publisher.sign = lambda manifest: manifest
    node.publisher.fork(PolicyVersion(2, 0))
    with pytest.raises(ManifestError, match=r"fork e3\.v0"):
        follower.poll_once()
    assert served_digest(node)[0] == PolicyVersion(2, 0)


# Offers


def test_a_rejected_update_comes_again_with_the_next(node: Node) -> None:
    node.follow()
    before = node.publisher.state
    node.publisher.step()
    assert node.follower.poll_once()
    staged = node.follower.hold()
    assert staged is not None
    node.follower.reject(staged, "engine says no")
    assert node.follower.last_error == "engine says no"
    assert not node.follower.poll_once(), "not again at once"
    node.publisher.step()
    assert_covers(node.follow(), changed_places(before, node.publisher.state))
    assert node.follower.last_error == ""


def test_what_is_held_does_not_change(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.producers.node_mirror.IMAGE_DEADLINE_S", 0.05)
    neighbour = node.another()
    assert node.follower.poll_once()
    staged = node.follower.hold()
    assert staged is not None
    digest = node.mirror.digest()
    node.publisher.step()
    with pytest.raises(AnabranchError, match=r"gave up after .* held by process \d+"):
        neighbour.poll_once()
    assert node.mirror.digest() == digest
    node.follower.confirm(staged)
    assert node.follow(neighbour).policy == PolicyVersion(1, 1)


def test_an_offer_that_was_passed_is_held_as_what_is_there_now(node: Node) -> None:
    node.follow()
    before = node.publisher.state
    node.publisher.step()
    assert node.follower.poll_once()
    neighbour = node.another()
    node.publisher.step()
    node.follow(neighbour)
    staged = node.follower.hold()
    assert staged is not None
    assert staged.policy == PolicyVersion(1, 2)
    assert_covers(staged, changed_places(before, node.publisher.state))


def test_producers_of_a_node_fetch_once_and_each_learns_what_changed_for_it(node: Node) -> None:
    neighbour = node.another()
    node.follow()
    assert node.follow(neighbour).path == ("anchor e1.v0",)
    assert neighbour.fetched_bytes == 0
    before = node.publisher.state
    for _ in range(3):
        node.publisher.step(0.001)
        node.follow()
    staged = node.follow(neighbour)
    assert (staged.policy, neighbour.fetched_bytes) == (PolicyVersion(1, 3), 0)
    assert_covers(staged, changed_places(before, node.publisher.state))
    assert all(indices is not None for indices in staged.changed.values())


def test_while_a_neighbour_has_the_turn_one_waits_and_says_whom_for(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.producers.node_turn.TURN_DEADLINE_S", 0.5)
    neighbour = node.another()
    assert neighbour.mirror.try_turn()
    assert not node.follower.poll_once()
    assert node.follower.state is FollowerState.WAITING
    time.sleep(0.55)
    neighbour.mirror.note_progress()
    assert not node.follower.poll_once(), "it gets on"
    time.sleep(0.55)
    with pytest.raises(AnabranchError, match=r"waiting for process \d+ to fetch"):
        node.follower.poll_once()
    neighbour.mirror.end_turn()
    node.follow()


def test_an_idle_engine_is_woken_by_an_offer_and_errors_go_when_it_works_again(node: Node) -> None:
    node.store.head = PolicyVersion(1, 5)
    node.follower.start()
    deadline = time.monotonic() + 10
    while "no path" not in node.follower.last_error:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    node.store.head = PolicyVersion(1, 0)
    while (staged := node.follower.staged(wait_s=0.1)) is None:
        assert time.monotonic() < deadline
    assert staged.policy == PolicyVersion(1, 0)
    while node.follower.last_error:
        assert time.monotonic() < deadline


# Failures of a node with several producers


def until(ready: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_to_wait_for_a_neighbour_is_no_success(node: Node) -> None:
    node.follow()
    repair = spoil(node, node.publisher.step())
    neighbour = node.another()
    node.follower.start()
    until(lambda: "no path" in node.follower.last_error)
    until(neighbour.mirror.try_turn)
    until(lambda: node.follower.state is FollowerState.WAITING)
    polls = []
    head = node.follower._channel.news
    node.follower._channel.news = lambda above: (polls.append(above), head(above))[1]  # type: ignore[method-assign]
    until(lambda: len(polls) > 3)
    assert "no path" in node.follower.last_error
    repair()
    neighbour.mirror.end_turn()
    until(node.follower.staged)
    until(lambda: not node.follower.last_error)


def test_a_mirror_that_a_neighbour_moved_clears_the_error(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.follow()
    repair = spoil(node, node.publisher.step())
    neighbour = node.another()
    real_pauses(monkeypatch)
    node.follower.start()
    until(lambda: "no path" in node.follower.last_error)
    repair()
    neighbour.mirror.failures.worked()
    node.follow(neighbour)
    until(lambda: not node.follower.last_error)


def real_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.producers.turn_failures.RETRY_FIRST_S", 60.0)
    monkeypatch.setattr("anabranch.producers.turn_failures.TAKEOVER_S", 2.0)


def test_a_neighbour_keeps_the_pause_after_a_failure_and_says_what_failed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.follow()
    neighbour = node.another()
    repair = spoil(node, node.publisher.step())
    real_pauses(monkeypatch)
    with pytest.raises(ManifestError, match="no path"):
        node.follower.poll_once()
    get, asked = node.store.blobs.get, []
    monkeypatch.setattr(node.store.blobs, "get", lambda *chunk: (asked.append(chunk), get(*chunk))[1])
    for follower in (neighbour, node.follower) * 3:
        assert not follower.poll_once()
    assert asked == []
    assert neighbour.last_error.startswith(f"process {os.getpid()}: no path to weights e1.v1")
    repair()
    no_pauses(monkeypatch)
    node.mirror.failures.worked()
    node.follow()
    assert neighbour.poll_once()
    assert neighbour.last_error == ""


def test_what_was_kept_for_another_try_goes_when_a_neighbour_gets_there(node: Node) -> None:
    for _ in range(3):
        node.publisher.step()
    repair = spoil(node, Manifest.from_json(node.store.manifests[PolicyVersion(1, 0), "anchor"]))
    neighbour = node.another()
    with pytest.raises(ManifestError, match="no path"):
        node.follower.poll_once()
    assert node.follower._fetcher._kept
    repair()
    node.follow(neighbour)
    node.follow()
    assert not node.follower._fetcher._kept


def test_with_many_producers_the_reason_is_always_visible(node: Node) -> None:
    node.store.head = PolicyVersion(1, 5)
    followers = [node.follower, *(node.another() for _ in range(3))]
    for follower in followers:
        index = follower._channel.index
        follower._channel.index = lambda index=index, **above: (time.sleep(0.02), index(**above))[1]
        follower.start()
    until(lambda: all("no path" in f.last_error for f in followers))
    for _ in range(100):
        assert all("no path" in f.last_error for f in followers)
        time.sleep(0.005)
    node.store.head = PolicyVersion(1, 0)
    until(lambda: all(f.staged() and not f.last_error for f in followers))


def test_a_producer_that_ends_leaves_no_failure_to_the_others(node: Node) -> None:
    neighbour = node.another()
    node.follower._stop.set()
    with pytest.raises(StreamUnavailableError, match="the producer ends"):
        node.follower.poll_once()
    assert node.follow(neighbour).policy == PolicyVersion(1, 0)
    assert neighbour.mirror.failures.reason() == ""


def test_another_models_weights_end_the_producer(node: Node) -> None:
    follower = node.another(Layout.build([("other", "bf16", (4,))]))
    follower.start()
    with pytest.raises(ModelMismatchError, match=r"model\.path"):
        follower.staged(wait_s=10)
    assert follower.state is FollowerState.FAILED


def test_a_mistake_in_the_thread_ends_the_process_and_not_only_the_thread(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the producer would serve one version for ever and look alive."""

    def broken() -> PolicyVersion:
        raise KeyError("a bug")

    monkeypatch.setattr(node.follower._channel, "head", broken)
    node.follower.start()
    with pytest.raises(KeyError, match="a bug"):
        node.follower.staged(wait_s=10)
    assert "a bug" in node.follower.last_error
