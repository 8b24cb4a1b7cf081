"""The way to the head: what is leased before it is fetched, long ways, a damaged mirror, and what is started from."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from anabranch.producers import weight_plan
from anabranch.producers.fetcher import TRIES
from anabranch.producers.node_turn import FollowerState
from anabranch.schemas.errors import ConfigError, ManifestError
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from tests.unit.producers.test_weight_follower import Node, no_pauses, spoil


class Leases:
    """A hub that grants every lease at once; `before` runs just before it counts."""

    error = ""

    def __init__(self) -> None:
        self.held: PolicyVersion | None = None
        self.before: Any = lambda: None
        self.head: PolicyVersion | None = None
        self.asked = 0

    def protect(self, policy: PolicyVersion, *, wait_s: float = 0.0) -> bool:
        if self.held is not None and self.held <= policy:
            return False
        self.before()
        self.held = policy
        return True

    def hub_head(self, *, wait_s: float) -> PolicyVersion | None:
        self.asked += 1
        return self.head


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    no_pauses(monkeypatch)
    made = Node(tmp_path / "node")
    made.publisher.open()
    yield made
    made.close()


def test_what_retention_took_before_the_lease_counted_is_not_fetched(node: Node) -> None:
    for _ in range(3):
        node.publisher.step()
    leases, channel = Leases(), node.channel()
    follower = node.another(leases=leases)

    def drop() -> None:
        node.publisher.anchor()
        node.publisher.step()
        channel.drop([e for e in channel.index() if e.policy < PolicyVersion(1, 3)])
        leases.before = lambda: None

    leases.before = drop
    with capture_logs() as logs:
        assert follower.poll_once()
    staged = follower.hold()
    assert staged is not None
    assert staged.path == ("anchor e1.v3",)
    assert logs == [], "nothing was refused on the way: the path was looked for again"
    follower.confirm(staged)


def test_a_long_way_is_planned_piece_by_piece_and_told_as_one(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_plan, "MOST_AT_ONCE", 3)
    node.follow()
    published = [node.publisher.step() for _ in range(8)]
    asked: list[int] = []
    manifests = node.follower._channel.manifests
    monkeypatch.setattr(
        node.follower._channel, "manifests", lambda names: (asked.append(len(names)), manifests(names))[1]
    )
    staged = node.follow()
    assert staged.path == tuple(f"delta e1.v{i}" for i in range(1, 9))
    assert staged.fetched_bytes == sum(m.payload_bytes for m in published)
    assert asked == [3, 3, 2]
    node.assert_mirrors_head()


def test_a_mirror_that_was_damaged_begins_anew_and_the_update_is_not_blamed(node: Node) -> None:
    """The step is on every way to the head: were it held to be broken, nobody would ever get there."""
    node.follow()
    node.publisher.step()
    node.mirror.tensor_bits("w")[:] ^= 0x4000
    with capture_logs() as logs:
        staged = node.follow()
    assert [entry["event"] for entry in logs] == ["this node's copy of the weights was damaged; it begins anew"]
    assert staged.path == ("anchor e1.v0", "delta e1.v1")
    assert all(indices is None for indices in staged.changed.values()), "everything is written anew"
    node.assert_mirrors_head()


def test_what_stays_broken_is_logged_once(node: Node) -> None:
    node.follow()
    spoil(node, node.publisher.step())
    with capture_logs() as logs:
        for _ in range(3):
            with pytest.raises(ManifestError, match="no path"):
                node.follower.poll_once()
    assert len(logs) == 1


def asked_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the chunks that are fetched from now on, by digest."""
    get, asked = node.store.blobs.get, Counter[str]()

    def counted(digest: str, size_bytes: int) -> bytes:
        asked[digest] += 1
        return get(digest, size_bytes)

    monkeypatch.setattr(node.store.blobs, "get", counted)
    return asked


def test_a_broken_anchor_costs_no_more_than_its_broken_chunk_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(6):
        node.publisher.step()
    anchor = Manifest.from_json(node.store.manifests[PolicyVersion(1, 0), "anchor"])
    repair, asked = spoil(node, anchor), asked_for(node, monkeypatch)
    for _ in range(10):
        with pytest.raises(ManifestError, match=r"around what is broken: anchor e1\.v0"):
            node.follower.poll_once()
    bad = anchor.chunks[0].digest
    assert asked[bad] == TRIES + 9
    assert all(times == 1 for digest, times in asked.items() if digest != bad)
    repair()
    node.follow()
    assert all(times == 1 for digest, times in asked.items() if digest != bad)
    node.assert_mirrors_head()


def test_a_manifest_found_broken_is_left_alone_for_a_while(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.follow()
    repair = spoil(node, node.publisher.step())
    monkeypatch.setattr("anabranch.producers.broken_manifests.PAUSE_FIRST_S", 30.0)
    asked = asked_for(node, monkeypatch)
    for _ in range(3):
        with pytest.raises(ManifestError, match=r"no path .* around what is broken: delta e1\.v1: .* altered"):
            node.follower.poll_once()
        assert sum(asked.values()) == TRIES
    node.publisher.step()
    node.publisher.anchor()
    assert node.follow().path == ("anchor e1.v2",), "another way is taken at once"
    repair()
    node.assert_mirrors_head()


def test_weights_that_are_not_what_they_say_are_fetched_more_and_more_seldom(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their chunks are as they are named: no store can mend them."""
    monkeypatch.setattr("anabranch.producers.broken_manifests.PAUSE_FIRST_S", 1e9)
    monkeypatch.setattr("anabranch.producers.broken_manifests.MENDABLE_LAST_S", 0.0)
    node.follow()
    node.publisher.sign = lambda m: m.model_copy(update={"result_digest": "3" * 32})
    node.publisher.step()
    asked = asked_for(node, monkeypatch)
    for _ in range(3):
        with pytest.raises(ManifestError, match="would result"):
            node.follower.poll_once()
    assert set(asked.values()) == {1}


# The start


def test_nothing_is_started_from_a_head_older_than_the_hubs(node: Node) -> None:
    """A head bears no signature: a replica can show an old one, all of it signed."""
    for _ in range(3):
        node.publisher.step()
    leases = Leases()
    leases.head, node.store.head = PolicyVersion(1, 3), PolicyVersion(1, 1)
    follower = node.another(leases=leases)
    with pytest.raises(ManifestError, match=r"head is e1\.v1 here, and was e1\.v3 on the hub"):
        follower.poll_once()
    assert follower.mirror.content() is None
    node.store.head = PolicyVersion(1, 3)
    assert node.follow(follower).policy == PolicyVersion(1, 3)
    assert leases.asked == 1, "once, so that one who starts does not run after a learner that is faster"


def test_a_node_that_has_the_hubs_version_starts_from_it_whatever_the_head(node: Node) -> None:
    node.publisher.step()
    node.follow()
    leases = Leases()
    leases.head, node.store.head = PolicyVersion(1, 1), PolicyVersion(1, 0)
    assert node.follow(node.another(leases=leases)).policy == PolicyVersion(1, 1)


def test_without_an_answer_of_the_hub_the_channels_head_is_taken(node: Node) -> None:
    assert node.follow(node.another(leases=Leases())).policy == PolicyVersion(1, 0)


def test_a_server_that_refuses_ends_a_producer_at_the_start_and_not_one_that_serves(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials that were changed, or a region's Redis that says so: the old version goes on serving."""

    def refuses() -> PolicyVersion:
        raise ConfigError("refused the credentials")

    starting = node.another()
    monkeypatch.setattr(starting._channel, "head", refuses)
    starting.start()
    with pytest.raises(ConfigError, match="refused the credentials"):
        starting.staged(wait_s=10)

    node.follow()
    monkeypatch.setattr(node.follower._channel, "head", refuses)
    node.follower.start()
    deadline = time.monotonic() + 10
    while "refused the credentials" not in node.follower.last_error:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert node.follower.staged() is None
    assert node.follower.state is not FollowerState.FAILED
    monkeypatch.undo()
    node.publisher.step()
    while node.follower.staged() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
