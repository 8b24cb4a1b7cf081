"""A learner's side of the weight channel in a few lines, for tests of those who read it: states of a small model, and
manifests of every kind over any channel."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from anabranch.kernels.delta_codec import CODEC, encode_anchor, encode_delta
from anabranch.kernels.digest import tensor_digest
from anabranch.schemas.layout import Layout, root_digest
from anabranch.schemas.manifest import Base, Chunk, Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.weight_channel import WeightChannel

LAYOUT = Layout.build([("embed", "bf16", (40, 8)), ("norm", "f32", (8,)), ("w", "bf16", (200, 50))])
State = dict[str, Any]  # name -> flat bits


def random_state(rng: np.random.Generator, layout: Layout = LAYOUT) -> State:
    width = {"bf16": np.uint16, "f32": np.uint32}
    return {t.name: rng.integers(0, 2**16, t.numel).astype(width[t.dtype]) for t in layout.tensors}


def stepped(state: State, rng: np.random.Generator, density: float = 0.01) -> State:
    new = {name: bits.copy() for name, bits in state.items()}
    for bits in new.values():
        bits[rng.random(bits.size) < density] += 1
    return new


def digest_of(state: State, layout: Layout = LAYOUT) -> str:
    return root_digest(layout, {t.name: tensor_digest(state[t.name]) for t in layout.tensors})


class Publisher:
    """Commits versions by hand; keeps every state. `sign` may turn a manifest into a signed one."""

    def __init__(self, channel: WeightChannel, layout: Layout = LAYOUT, *, run: str = "r", seed: int = 0) -> None:
        self.channel, self.layout, self.run = channel, layout, run
        self.rng = np.random.default_rng(seed)
        self.states: dict[PolicyVersion, State] = {}
        self.head: PolicyVersion | None = None
        self.fork_version = 0
        self.sign: Any = lambda manifest: manifest

    @property
    def state(self) -> State:
        assert self.head is not None
        return self.states[self.head]

    @property
    def digest(self) -> str:
        return digest_of(self.state, self.layout)

    def open(self, version: int = 0, state: State | None = None) -> PolicyVersion:
        """A new epoch, opened with an anchor."""
        self.channel.put_layout(self.layout)
        self.head = PolicyVersion(self.channel.open_epoch(), version)
        self.fork_version = version
        self.states[self.head] = random_state(self.rng, self.layout) if state is None else state
        self.anchor()
        return self.head

    def fork(self, at: PolicyVersion) -> PolicyVersion:
        """A new epoch whose first version is `at`."""
        self.head = PolicyVersion(self.channel.open_epoch(), at.version)
        self.fork_version = at.version
        self.states[self.head] = self.states[at]
        self._commit("fork", self.head, (), at, 0)
        return self.head

    def step(self, density: float = 0.01) -> Manifest:
        assert self.head is not None
        before = self.head
        self.head = PolicyVersion(before.epoch, before.version + 1)
        self.states[self.head] = stepped(self.states[before], self.rng, density)
        return self.merged("delta", before, self.head)

    def anchor(self) -> Manifest:
        assert self.head is not None
        return self._commit("anchor", self.head, encode_anchor(self.layout, self.state).chunks, None, 0)

    def skip(self, steps: int) -> Manifest:
        """From `steps` versions before the head to the head."""
        assert self.head is not None
        return self.merged("skip", PolicyVersion(self.head.epoch, self.head.version - steps), self.head)

    def merged(self, kind: Literal["delta", "skip"], base: PolicyVersion, policy: PolicyVersion) -> Manifest:
        encoded = encode_delta(self.layout, self.states[base], self.states[policy])
        return self._commit(kind, policy, encoded.chunks, base, encoded.changed_elements)

    def _commit(
        self,
        kind: Literal["anchor", "delta", "skip", "fork"],
        policy: PolicyVersion,
        chunks: tuple[bytes, ...],
        base: PolicyVersion | None,
        changed: int,
    ) -> Manifest:
        elements = sum(t.numel for t in self.layout.tensors)
        manifest = Manifest(
            kind=kind,
            run=self.run,
            epoch=policy.epoch,
            version=policy.version,
            base=None
            if base is None
            else Base(epoch=base.epoch, version=base.version, digest=digest_of(self.states[base], self.layout)),
            result_digest=digest_of(self.states[policy], self.layout),
            layout_hash=self.layout.hash,
            codec=CODEC,
            chunks=tuple(Chunk(digest=self.channel.blobs.put(c), size_bytes=len(c)) for c in chunks),
            full_bytes=self.layout.payload_bytes,
            changed_elements=elements if kind == "anchor" else changed,
            total_elements=elements,
            learner_step=policy.version,
            fork_version=self.fork_version,
            published_ms=1_000 + policy.version,
        )
        manifest = self.sign(manifest)
        self.channel.commit(manifest)
        return manifest
