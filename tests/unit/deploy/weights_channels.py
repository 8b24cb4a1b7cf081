"""A weight channel made by hand: versions with anchors, deltas, skips and a fork, and ways to break it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anabranch.kernels.delta_codec import CODEC, Encoded, encode_anchor, encode_delta
from anabranch.kernels.delta_dtypes import Bits, uint_dtype
from anabranch.kernels.digest import tensor_digest
from anabranch.schemas.layout import Layout, root_digest
from anabranch.schemas.manifest import Base, Chunk, Manifest
from anabranch.schemas.versions import PolicyVersion
from anabranch.transport.weight_channel import WeightChannel

LAYOUT = Layout.build([("a", "bf16", (3000,)), ("b", "f32", (30, 20)), ("c", "bf16", (100,)), ("d", "u8", (50,))])
BEGAN_MS = 1_700_000_000_000
State = Mapping[str, Bits]


def first_state() -> dict[str, Bits]:
    rng = np.random.default_rng(0)
    return {t.name: rng.integers(0, 200, t.numel).astype(uint_dtype(t.dtype)) for t in LAYOUT.tensors}


def stepped(state: State, seed: int, share: float = 0.02) -> dict[str, Bits]:
    rng = np.random.default_rng(seed)
    return {name: (bits + (rng.random(bits.size) < share)).astype(bits.dtype) for name, bits in state.items()}


def digest_of(state: State) -> str:
    return root_digest(LAYOUT, {name: tensor_digest(bits) for name, bits in state.items()})


@dataclass
class Made:
    """Publishes over `channel` as a learner would. `states` keeps every version's weights."""

    channel: WeightChannel
    run: str
    sign: Any = lambda manifest: manifest
    epoch: int = 0
    states: dict[PolicyVersion, dict[str, Bits]] = field(default_factory=dict)
    fork_version: int = 0

    def begin(self, version: int = 0) -> PolicyVersion:
        """A new epoch with an anchor of fresh weights."""
        self.epoch, self.fork_version = self.channel.open_epoch(), version
        policy = PolicyVersion(self.epoch, version)
        self.states[policy] = first_state()
        self.channel.put_layout(LAYOUT)
        self.anchor(policy)
        return policy

    def fork(self, of: PolicyVersion) -> PolicyVersion:
        self.epoch, self.fork_version = self.channel.open_epoch(), of.version
        policy = PolicyVersion(self.epoch, of.version)
        self.states[policy] = self.states[of]
        self.commit("fork", policy, of, None)
        return policy

    def step(self, count: int = 1) -> PolicyVersion:
        """Deltas onward from the newest version."""
        for _ in range(count):
            base = max(self.states)
            policy = PolicyVersion(self.epoch, base.version + 1)
            self.states[policy] = stepped(self.states[base], policy.epoch * 1000 + policy.version)
            self.commit("delta", policy, base, encode_delta(LAYOUT, self.states[base], self.states[policy]))
        return policy

    def anchor(self, policy: PolicyVersion) -> Manifest:
        return self.commit("anchor", policy, None, encode_anchor(LAYOUT, self.states[policy]))

    def skip(self, policy: PolicyVersion, steps: int) -> Manifest:
        base = PolicyVersion(policy.epoch, policy.version - steps)
        return self.commit("skip", policy, base, encode_delta(LAYOUT, self.states[base], self.states[policy]))

    def commit(
        self, kind: str, policy: PolicyVersion, base: PolicyVersion | None, encoded: Encoded | None, **changes: Any
    ) -> Manifest:
        """`changes` replace fields of the manifest."""
        chunks = encoded.chunks if encoded else ()
        total = sum(t.numel for t in LAYOUT.tensors)
        fields: dict[str, Any] = {
            "kind": kind, "run": self.run, "epoch": policy.epoch, "version": policy.version,
            "base": Base(epoch=base.epoch, version=base.version, digest=digest_of(self.states[base])) if base else None,
            "result_digest": digest_of(self.states[policy]), "layout_hash": LAYOUT.hash, "codec": CODEC,
            "chunks": tuple(Chunk(digest=self.channel.blobs.put(c), size_bytes=len(c)) for c in chunks),
            "full_bytes": LAYOUT.payload_bytes, "changed_elements": encoded.changed_elements if encoded else 0,
            "total_elements": total, "learner_step": policy.version, "fork_version": self.fork_version,
            "published_ms": BEGAN_MS + 1000 * policy.version,
        }  # fmt: skip
        manifest = self.sign(Manifest.model_validate(fields | changes))
        self.channel.commit(manifest)
        return manifest


def usual(channel: WeightChannel, run: str, **more: Any) -> Made:
    """e1.v0 to e1.v8 with an anchor at 0 and 6 and skips over 2 and 4; e2 forked from e1.v5, to e2.v8."""
    made = Made(channel, run, **more)
    made.begin()
    for version in range(1, 9):
        policy = made.step()
        if version % 2 == 0:
            made.skip(policy, 2)
        if version % 4 == 0:
            made.skip(policy, 4)
        if version == 6:
            made.anchor(policy)
    made.fork(PolicyVersion(1, 5))
    made.step(3)
    return made
