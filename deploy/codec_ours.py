"""Our own delta and snapshot as formats of the benchmark.

Invariant: a size is that of the delta file that `anabranch delta diff` would write: header with layout, digests and
counts, then the chunks. Held by tests/unit/deploy/test_codec_ours.py.

Building that header from the encoded chunks is not timed, as writing arc_v3's safetensors file is not; neither are the
digests of the two states, which a learner keeps from step to step and moves by what changed.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from anabranch.deploy.codec_pair import Pair, State
from anabranch.kernels.delta_codec import (
    CODEC,
    Encoded,
    apply_changes,
    decode,
    decode_anchor,
    encode_anchor,
    encode_delta,
)
from anabranch.kernels.delta_dtypes import Bits
from anabranch.kernels.digest import tensor_digest
from anabranch.kernels.workers import Workers
from anabranch.schemas.delta_file import DeltaHeader, FileManifest
from anabranch.schemas.layout import root_digest
from anabranch.schemas.manifest import Base, Chunk
from anabranch.transport.blob_store import blob_digest

_SHARED_FROM = 2**20  # changed elements from which applying them is worth waking other threads


class Delta:
    """The delta from the pair's base to its new state."""

    name = "anabranch"
    kind: Literal["delta", "anchor"] = "delta"

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def prepare(self, base: State, new: State) -> tuple[State, State]:
        return base, new

    def encode(self, base: State, new: State, workers: Workers) -> Encoded:
        return encode_delta(self._pair.layout, base, new, workers)

    def size_bytes(self, encoded: Encoded) -> int:
        return len(self._header(encoded).pack()) + sum(map(len, encoded.chunks))

    def decode(self, state: dict[str, Bits], encoded: Encoded, workers: Workers) -> State:
        changes = decode(self._pair.layout, encoded.chunks, state, workers)
        if sum(change.bits.size for change in changes) < _SHARED_FROM:
            apply_changes(state, changes)
        else:
            list(workers.in_order(lambda change: apply_changes(state, [change]), changes))
        return state

    def _header(self, encoded: Encoded) -> DeltaHeader:
        layout, is_delta = self._pair.layout, self.kind == "delta"
        manifest = FileManifest(
            run="bench", epoch=1, version=1,
            base=Base(epoch=1, version=0, digest=self._digests[0]) if is_delta else None, result_digest=self._digests[1], layout_hash=layout.hash,
            codec=CODEC, chunks=tuple(Chunk(digest=blob_digest(c), size_bytes=len(c)) for c in encoded.chunks),
            full_bytes=layout.payload_bytes, changed_elements=encoded.changed_elements,
            total_elements=self._pair.elements, learner_step=1, fork_version=0, published_ms=1_700_000_000_000,
        )  # fmt: skip
        return DeltaHeader(manifest, layout, encoded.changed_by_tensor, (len(encoded.chunks),))

    @cached_property
    def _digests(self) -> tuple[str, str]:
        """Of the base and of the new state."""
        base, new = (
            root_digest(self._pair.layout, {name: tensor_digest(bits) for name, bits in state.items()})
            for state in (self._pair.base, self._pair.new)
        )
        return base, new


class Snapshot(Delta):
    """A full snapshot of the pair's new state."""

    name = "anabranch-snapshot"
    kind = "anchor"

    def encode(self, base: State, new: State, workers: Workers) -> Encoded:
        return encode_anchor(self._pair.layout, new, workers)

    def decode(self, state: dict[str, Bits], encoded: Encoded, workers: Workers) -> State:
        decode_anchor(self._pair.layout, encoded.chunks, state, workers)
        return state
