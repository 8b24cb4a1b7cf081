"""The digest of a node's mirror, as sums per tensor in its control memory.

Invariant: while the mirror is VALID the stored sums are those of its bits, and `digest` is the root digest over them; what
an update will make of them is worked out from old and new bits of the places it touches, before a byte is written. Held by
tests/unit/producers/test_node_mirror.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anabranch.kernels.delta_codec import TensorChange
from anabranch.kernels.delta_dtypes import Bits
from anabranch.kernels.digest import Sums, add_sums, digest_of_sums, subtract_sums, sums_at, tensor_sums
from anabranch.kernels.workers import Workers
from anabranch.producers.mirror import places
from anabranch.producers.mirror_memory import MirrorMemory
from anabranch.schemas.layout import Layout, root_digest


class MirrorSums:
    def __init__(self, layout: Layout, memory: MirrorMemory, bits: Mapping[str, Bits], workers: Workers) -> None:
        self._layout, self._stored, self._bits, self._workers = layout, memory.sums, bits, workers
        self._number = {spec.name: i for i, spec in enumerate(layout.tensors)}

    def after(self, changes: Sequence[TensorChange]) -> dict[int, Sums]:
        """Sums, as they will be, of the tensors that `changes` (of disjoint places) touch, by number."""
        after: dict[int, Sums] = {}
        for tensor, gone, come in self._workers.in_order(self._of, changes):
            after[tensor] = add_sums(subtract_sums(after.get(tensor, self._of_tensor(tensor)), gone), come)
        return after

    def store(self, sums: Mapping[int, Sums]) -> None:
        for tensor, lanes in sums.items():
            self._stored[tensor] = lanes

    def recomputed(self) -> dict[int, Sums]:
        """Of every tensor, from its bits."""
        return {i: tensor_sums(self._bits[t.name], workers=self._workers) for i, t in enumerate(self._layout.tensors)}

    def digest(self, changed: Mapping[int, Sums]) -> str:
        """Root digest with `changed` in place of the stored sums of those tensors."""
        digests = {
            spec.name: digest_of_sums(changed[i] if i in changed else self._of_tensor(i))
            for i, spec in enumerate(self._layout.tensors)
        }
        return root_digest(self._layout, digests)

    def _of(self, change: TensorChange) -> tuple[int, Sums, Sums]:
        """(tensor, what it loses, what it gets)."""
        old = self._bits[change.name][places(change)]
        if change.indices is None:
            gone, come = tensor_sums(old, change.start), tensor_sums(change.bits, change.start)
        else:
            gone, come = sums_at(change.indices, old), sums_at(change.indices, change.bits)
        return self._number[change.name], gone, come

    def _of_tensor(self, tensor: int) -> Sums:
        first, second = self._stored[tensor].tolist()
        return first, second
