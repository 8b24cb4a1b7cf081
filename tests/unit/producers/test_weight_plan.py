"""Plans: what is read of the channel for one, what they are checked for, what they say."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.producers.weight_plan import Planner, Unusable
from anabranch.schemas.errors import ManifestError
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from anabranch.transport.weight_path import State
from tests.weights import LAYOUT, Publisher

RUN = "r"
HERE = PolicyVersion(1, 0)


class CountedChannel(MemoryWeightChannel):
    """Notes every question that would be a round trip."""

    def __init__(self, store: MemoryWeightStore) -> None:
        super().__init__(store)
        self.asked: list[str] = []

    def index(self, **kwargs: Any) -> Any:
        self.asked.append("index" if kwargs.get("above") is None else "index above")
        return super().index(**kwargs)

    def manifests(self, names: Any) -> Any:
        self.asked.append(f"{len(names)} manifests")
        return super().manifests(names)


class World:
    def __init__(self) -> None:
        self.store = MemoryWeightStore(RUN)
        self.publisher = Publisher(MemoryWeightChannel(self.store))
        self.publisher.open()
        self.channel = CountedChannel(self.store)
        self.planner = Planner(self.channel, LAYOUT, run=RUN)
        self.start = State(HERE, self.publisher.digest)

    @property
    def head(self) -> PolicyVersion:
        assert self.publisher.head is not None
        return self.publisher.head

    def rewrite(self, label: str, policy: PolicyVersion, **fields: Any) -> None:
        before = Manifest.from_json(self.store.manifests[policy, label])
        self.store.manifests[policy, label] = before.model_copy(update=fields).model_dump_json()


@pytest.fixture
def world() -> World:
    return World()


def test_a_path_from_what_is_at_hand_takes_two_round_trips(world: World) -> None:
    for _ in range(5):
        world.publisher.step()
    world.publisher.merged("skip", PolicyVersion(1, 0), PolicyVersion(1, 4))
    plan = world.planner.plan(world.start, world.head, {})
    assert plan.path == ("skip4 e1.v4", "delta e1.v5")
    assert plan.needs == HERE
    assert world.channel.asked == ["index above", "2 manifests"]


def test_another_state_under_the_same_number_starts_from_an_anchor(world: World) -> None:
    for _ in range(3):
        world.publisher.step()
    elsewhere = State(PolicyVersion(1, 1), "0" * 32)
    plan = world.planner.plan(elsewhere, world.head, {})
    assert plan.path == ("anchor e1.v0", "delta e1.v1", "delta e1.v2", "delta e1.v3")
    assert world.channel.asked == ["index above", "2 manifests", "index", "4 manifests"]


def test_a_new_name_of_the_same_state_is_believed_from_a_manifest(world: World) -> None:
    world.publisher.fork(HERE)
    plan = world.planner.plan(world.start, world.head, {})
    assert (plan.manifests, plan.path, plan.needs) == ((), ("fork e2.v0",), None)
    assert world.channel.asked[-1] == "1 manifests"


def test_a_way_around_what_is_broken(world: World) -> None:
    for _ in range(2):
        world.publisher.step()
    broken: dict[Any, Exception] = {(PolicyVersion(1, 1), "delta"): ManifestError("bad chunk")}
    with pytest.raises(ManifestError, match=r"from e1\.v0 .* around what is broken: delta e1\.v1: bad chunk"):
        world.planner.plan(world.start, world.head, broken)
    world.publisher.skip(2)
    assert world.planner.plan(world.start, world.head, broken).path == ("skip2 e1.v2",)


def test_everything_that_is_unusable_on_a_path_is_named_at_once(world: World) -> None:
    for _ in range(5):
        world.publisher.step()
    for version in (1, 2, 4, 5):
        world.rewrite("delta", PolicyVersion(1, version), codec="unknown/9")
    with pytest.raises(Unusable, match=r"delta e1\.v1: it uses codec 'unknown/9'.* and 1 more") as caught:
        world.planner.plan(world.start, world.head, {})
    assert {policy.version for policy, _ in caught.value.broken} == {1, 2, 4, 5}


def test_a_manifest_that_went_meanwhile_is_unusable(world: World) -> None:
    world.publisher.step()
    del world.store.manifests[PolicyVersion(1, 1), "delta"]
    with pytest.raises(Unusable, match="in the index, but not on the channel"):
        world.planner.plan(world.start, world.head, {})


def test_more_bytes_than_such_a_state_can_take_are_not_fetched(world: World) -> None:
    manifest = world.publisher.step()
    large = manifest.chunks[0].model_copy(update={"size_bytes": 2**28})
    name = PolicyVersion(1, 1), "delta"
    world.rewrite("delta", PolicyVersion(1, 1), chunks=(large,))
    entry = world.store.entries[name]
    world.store.entries[name] = type(entry)(
        entry.policy, entry.label, entry.base, large.size_bytes, entry.chunks, entry.digest
    )
    with pytest.raises(Unusable, match="more than such a state can take"):
        world.planner.plan(world.start, world.head, {})


def test_each_base_is_what_the_manifest_before_results_in(world: World) -> None:
    world.publisher.step()
    manifest = world.publisher.step()
    assert manifest.base is not None
    world.rewrite("delta", PolicyVersion(1, 2), base=manifest.base.model_copy(update={"digest": "4" * 32}))
    with pytest.raises(Unusable, match=r"delta e1\.v2: it goes on from digest 4444"):
        world.planner.plan(world.start, world.head, {})


def test_what_was_read_with_the_head_is_not_read_again(world: World) -> None:
    world.publisher.step()
    head, newer = world.channel.news(HERE)
    world.channel.asked.clear()
    plan = world.planner.plan(world.start, world.head, {}, newer=newer)
    assert head == world.head
    assert plan.path == (f"delta {world.head}",)
    assert world.channel.asked == ["1 manifests"]
