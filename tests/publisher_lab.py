"""A learner's weights and its publishers over a world in memory, and a channel that fails or waits where a test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anabranch.schemas.layout import Layout
from anabranch.schemas.manifest import Manifest
from anabranch.transport.memory_weight_channel import MemoryWeightChannel
from anabranch.transport.memory_world import MemoryWorld
from tests.publishers import Ranks, State, change, copy, hub_of, random_state

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
