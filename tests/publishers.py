"""Publishers over a channel in memory, and what a follower makes of that channel: helpers of tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from anabranch.kernels.delta_codec import apply_changes, decode, decode_anchor
from anabranch.kernels.delta_dtypes import Bits, uint_dtype
from anabranch.kernels.digest import tensor_digest
from anabranch.learner.publish_order import EpochOpening
from anabranch.learner.shares import ArrayShare
from anabranch.learner.version_lines import VersionLines
from anabranch.learner.weight_publisher import WeightPublisher
from anabranch.schemas.config import ChannelSection
from anabranch.schemas.layout import Layout, root_digest
from anabranch.schemas.manifest import Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.schemas.weight_index import IndexEntry
from anabranch.transport.memory_world import MemoryWorld
from anabranch.transport.weight_channel import WeightChannel
from anabranch.transport.wiring import Hub

State = dict[str, Bits]


def random_state(layout: Layout, rng: np.random.Generator) -> State:
    return {t.name: rng.integers(0, 2**15, t.numel).astype(uint_dtype(t.dtype)) for t in layout.tensors}


def digest_of(layout: Layout, state: State) -> str:
    """Of the whole state at once: what sums of shares must add up to."""
    return root_digest(layout, {name: tensor_digest(bits) for name, bits in state.items()})


def hub_of(world: MemoryWorld, channel: WeightChannel | None = None) -> Hub:
    return Hub(
        channel=channel or world.channel(), permits=world.permits, runs=world.runs, evaluations=world.evaluations
    )


class Ranks:
    """The publishers of all ranks of a learner, in one process, over one state that a test changes in place."""

    def __init__(
        self,
        world: MemoryWorld,
        layout: Layout,
        state: State,
        *,
        world_size: int = 1,
        fork_version: int = 0,
        epoch: int | None = None,
        connect: Callable[[], Hub] | None = None,
        missing: Iterable[int] = (),
        on_committed: Callable[[Hub, PolicyVersion], object] = lambda hub, policy: None,
        lines: VersionLines | None = None,
        **config: Any,
    ) -> None:
        self.layout, self.state, self.version = layout, state, fork_version
        self.epoch = world.channel().open_epoch() if epoch is None else epoch
        opening = EpochOpening(world.run, self.epoch, fork_version, fork_version)
        section = ChannelSection(**({"connect_deadline_s": 5.0, "codec_threads": 1} | config))
        self.publishers = [
            WeightPublisher(
                ArrayShare(layout, state, rank=rank, world_size=world_size),
                connect or (lambda: hub_of(world)),
                section,
                opening,
                on_committed=on_committed,
                lines=lines if rank == 0 else None,
            )
            for rank in range(world_size)
            if rank not in set(missing)
        ]

    @property
    def lead(self) -> WeightPublisher:
        return self.publishers[0]

    def open(self) -> Ranks:
        for publisher in self.publishers:
            publisher.open()
        self.lead.flush()
        return self

    def hand_over(self, *, anchor: bool = False) -> None:
        """The next version, of the state as it is."""
        self.version += 1
        order = self.lead.next_order(self.version)
        order = replace(order, anchor=order.anchor or anchor)
        for publisher in self.publishers:
            publisher.publish(order)

    def publish(self, *, anchor: bool = False) -> Manifest:
        """`hand_over`, and wait until it is there."""
        self.hand_over(anchor=anchor)
        published = self.lead.flush()
        assert published is not None
        return published.manifest

    def drain(self) -> None:
        for publisher in self.publishers[::-1]:  # rank 0 waits for the others' shares
            publisher.drain()

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def change(state: State, rng: np.random.Generator, density: float = 0.05) -> None:
    for bits in state.values():
        bits[rng.random(bits.size) < density] += 1


def copy(state: State) -> State:
    return {name: bits.copy() for name, bits in state.items()}


def apply(channel: WeightChannel, layout: Layout, entry: IndexEntry, state: State) -> None:
    """Bring `state` by `entry` to its version."""
    (manifest,) = channel.manifests([(entry.policy, entry.label)])
    assert manifest is not None
    chunks = [channel.blobs.get(c.digest, c.size_bytes) for c in manifest.chunks]
    if manifest.kind == "anchor":
        decode_anchor(layout, chunks, state)
    else:
        apply_changes(state, decode(layout, chunks, state))
    assert digest_of(layout, state) == manifest.result_digest


class Gate:
    """Holds whoever passes through it until it is opened."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self._open.wait(30), "nobody opened the gate"

    def open(self) -> None:
        self._open.set()
