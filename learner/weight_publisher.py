"""Publishes the learner's weights on the channel: an anchor when the epoch opens, a delta after every step.

Invariant: the head moves only when payload, digests and manifest are stored; the base of a delta is exactly what this
publisher last committed (kept as a copy, compared by bits), so lr = 0 gives an empty delta. A failed publish leaves
base and head as they were. Held by tests/unit/learner/test_weight_publisher.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from anabranch.kernels.delta_codec import CODEC, Encoded, encode_anchor, encode_delta
from anabranch.kernels.delta_dtypes import Bits
from anabranch.kernels.digest import tensor_digest
from anabranch.kernels.workers import Workers
from anabranch.schemas.config import ChannelSection
from anabranch.schemas.layout import Layout, root_digest
from anabranch.schemas.manifest import Chunk, Manifest
from anabranch.transport.weight_channel import WeightChannel


@dataclass(frozen=True, slots=True)
class PublishReport:
    delta_bytes: int
    full_bytes: int
    changed_elements: int
    total_elements: int
    digest: str
    seconds: float

    @property
    def changed_fraction(self) -> float:
        return self.changed_elements / max(1, self.total_elements)


class WeightPublisher:
    """One epoch's publisher. `state` arguments map every name of `layout` to flat bits (unsigned integers)."""

    def __init__(
        self, channel: WeightChannel, layout: Layout, config: ChannelSection, *, run: str, epoch: int, fork_version: int
    ) -> None:
        self._channel, self._layout, self._config = channel, layout, config
        self._run, self._epoch, self._fork_version = run, epoch, fork_version
        self._base: dict[str, Bits] = {}
        self._tensor_digests: dict[str, str] = {}
        self._version = fork_version
        self._digest = ""
        self._last = Encoded((), 0, (), ())
        self._workers = Workers(config.codec_threads)
        self._stamps: dict[tuple[str, int], int] = {}  # a publish that is retried must commit the very same manifest

    @property
    def digest(self) -> str:
        """Root digest of what is on the channel now."""
        return self._digest

    def open(self, state: Mapping[str, Bits], *, step: int) -> PublishReport:
        """Publish `state` as the epoch's anchor, at the fork version."""
        started = time.monotonic()
        self._channel.put_layout(self._layout)
        encoded = encode_anchor(self._layout, state, self._workers)
        digests = {t.name: tensor_digest(state[t.name]) for t in self._layout.tensors}
        digest = root_digest(self._layout, digests)
        self._commit("anchor", encoded, self._fork_version, digest, step)
        self._base = {t.name: state[t.name].reshape(-1).copy() for t in self._layout.tensors}
        self._tensor_digests, self._digest = digests, digest
        return self._report(encoded, started)

    def publish(self, state: Mapping[str, Bits], version: int, *, step: int) -> PublishReport:
        """Publish `state` as `version`, a delta on the version published last (and an anchor every `anchor_every`).

        After a StreamUnavailableError or BackpressureError call it again with the same arguments: what was done is not
        done twice.
        """
        started = time.monotonic()
        if version != self._version:
            encoded = encode_delta(self._layout, self._base, state, self._workers)
            digests = self._tensor_digests | {n: tensor_digest(state[n]) for n in encoded.changed_tensors}
            digest = root_digest(self._layout, digests)
            self._commit("delta", encoded, version, digest, step)
            for name in encoded.changed_tensors:
                np.copyto(self._base[name], state[name].reshape(-1))
            self._version, self._tensor_digests, self._digest = version, digests, digest
            self._last, self._stamps = encoded, {}
        if (version - self._fork_version) % self._config.anchor_every == 0:
            anchor = encode_anchor(self._layout, state, self._workers)
            self._commit("anchor", anchor, version, self._digest, step)
        self._channel.retain(self._config.keep_versions)
        return self._report(self._last, started)

    def _commit(self, kind: str, encoded: Encoded, version: int, digest: str, step: int) -> None:
        chunks = tuple(Chunk(digest=self._channel.put_blob(c), size_bytes=len(c)) for c in encoded.chunks)
        delta = kind == "delta"
        self._channel.commit(
            Manifest(
                kind="delta" if delta else "anchor",
                run=self._run,
                epoch=self._epoch,
                version=version,
                base_version=self._version if delta else None,
                base_digest=self._digest if delta else None,
                result_digest=digest,
                layout_hash=self._layout.hash,
                codec=CODEC,
                chunks=chunks,
                full_bytes=self._layout.payload_bytes,
                changed_elements=encoded.changed_elements,
                total_elements=sum(t.numel for t in self._layout.tensors),
                learner_step=step,
                fork_version=self._fork_version,
                published_ms=self._stamps.setdefault((kind, version), time.time_ns() // 1_000_000),
            )
        )

    def _report(self, encoded: Encoded, started: float) -> PublishReport:
        return PublishReport(
            delta_bytes=sum(len(c) for c in encoded.chunks),
            full_bytes=self._layout.payload_bytes,
            changed_elements=encoded.changed_elements,
            total_elements=sum(t.numel for t in self._layout.tensors),
            digest=self._digest,
            seconds=time.monotonic() - started,
        )
