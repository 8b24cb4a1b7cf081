"""Publishing survives a channel that fails in the middle: nothing is done twice, nothing is left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anabranch.learner.weight_publisher import WeightPublisher
from anabranch.schemas.config import ChannelSection
from anabranch.schemas.errors import ConfigError, StreamUnavailableError
from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.memory_weight_channel import MemoryWeightChannel, MemoryWeightStore

LAYOUT = Layout.build([("a", "bf16", (100,)), ("b", "f32", (10,))])


def state(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"a": rng.integers(0, 2**16, 100).astype(np.uint16), "b": rng.integers(0, 2**32, 10).astype(np.uint32)}


class FlakyChannel(MemoryWeightChannel):
    """Fails once where it is told to: before or after the real thing was done."""

    fail: tuple[str, str] | None = None

    def _maybe(self, name: str, when: str) -> None:
        if self.fail == (name, when):
            self.fail = None
            raise StreamUnavailableError(f"{name} {when}")

    def put_blob(self, payload: bytes) -> str:
        self._maybe("put_blob", "before")
        return super().put_blob(payload)

    def commit(self, manifest: Manifest) -> None:
        self._maybe(f"commit-{manifest.kind}", "before")
        super().commit(manifest)
        self._maybe(f"commit-{manifest.kind}", "after")

    def retain(self, keep_versions: int) -> int:
        self._maybe("retain", "before")
        return super().retain(keep_versions)


def opened(channel: MemoryWeightChannel, **config: Any) -> WeightPublisher:
    publisher = WeightPublisher(
        channel, LAYOUT, ChannelSection(**config), run="r", epoch=channel.open_epoch(), fork_version=0
    )
    publisher.open(state(0), step=0)
    return publisher


@pytest.mark.parametrize(
    "fail",
    [
        ("put_blob", "before"), ("commit-delta", "before"), ("commit-delta", "after"), ("commit-anchor", "before"),
        ("commit-anchor", "after"), ("retain", "before"),
    ],
    ids="-".join,
)  # fmt: skip
def test_a_publish_that_failed_anywhere_can_be_repeated(fail: tuple[str, str]) -> None:
    channel = FlakyChannel(MemoryWeightStore("r"))
    publisher = opened(channel, anchor_every=1)
    channel.fail = fail
    with pytest.raises(StreamUnavailableError):
        publisher.publish(state(1), 1, step=1)
    report = publisher.publish(state(1), 1, step=1)
    assert report.changed_elements == int(
        (state(0)["a"] != state(1)["a"]).sum() + (state(0)["b"] != state(1)["b"]).sum()
    )
    publisher.publish(state(2), 2, step=2)
    assert channel.head() == PolicyVersion(1, 2)
    chain = [channel.manifest(PolicyVersion(1, v), "delta") for v in (1, 2)]
    assert chain[0] is not None
    assert chain[1] is not None
    assert chain[1].base_digest == chain[0].result_digest
    assert channel.newest_anchor(1, 2) is not None


def test_a_stale_learner_cannot_move_the_head() -> None:
    """ConfigError, which no supervisor restarts: two learners would take the run from each other for ever."""
    channel = MemoryWeightChannel(MemoryWeightStore("r"))
    old = opened(channel)
    opened(channel)
    with pytest.raises(ConfigError, match="one learner per run name"):
        old.publish(state(1), 1, step=1)
    assert channel.head() == PolicyVersion(2, 0)


def test_the_same_bits_are_an_empty_delta() -> None:
    channel = MemoryWeightChannel(MemoryWeightStore("r"))
    publisher = opened(channel)
    report = publisher.publish(state(0), 1, step=1)
    assert (report.delta_bytes, report.changed_elements) == (0, 0)
