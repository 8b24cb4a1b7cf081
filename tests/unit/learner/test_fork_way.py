"""An epoch begins as a fork only of what a newcomer can get to."""

from __future__ import annotations

import pytest

from anabranch.learner.fork_way import Way
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore
from tests.weights import Publisher


@pytest.fixture
def channel() -> MemoryWeightChannel:
    made = MemoryWeightChannel(MemoryWeightStore("r"))
    publisher = Publisher(made)
    publisher.open()
    publisher.step()
    return made


def way(channel: MemoryWeightChannel, version: int, told: list[int] | None = None) -> Way:
    told = [] if told is None else told
    return Way(channel, channel.index(), PolicyVersion(1, version), threads=2, progress=lambda: told.append(1))


def test_a_whole_way_is_followed_and_says_how_it_gets_on(channel: MemoryWeightChannel) -> None:
    told: list[int] = []
    assert way(channel, 1, told).can_be_followed(time_s=60)
    assert len(told) == sum(entry.chunks for entry in channel.index())


def test_no_way_is_not_followed(channel: MemoryWeightChannel) -> None:
    assert not way(channel, 7).can_be_followed(time_s=60)


@pytest.mark.parametrize("label", ["anchor", "delta"])
def test_one_with_a_lost_chunk_is_not(channel: MemoryWeightChannel, label: str) -> None:
    (manifest,) = channel.manifests([(PolicyVersion(1, 0 if label == "anchor" else 1), label)])
    assert manifest is not None
    channel.blobs.delete([manifest.chunks[0].digest])
    assert not way(channel, 1).can_be_followed(time_s=60)


def test_when_time_is_up_the_rest_is_taken_to_be_intact(channel: MemoryWeightChannel) -> None:
    (delta,) = channel.manifests([(PolicyVersion(1, 1), "delta")])
    assert delta is not None
    channel.blobs.delete([delta.chunks[-1].digest])  # read last
    assert way(channel, 1).can_be_followed(time_s=-1)
