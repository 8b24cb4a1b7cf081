"""One state of a model in memory that knows its own digest, for checking the weight channel.

Invariant: `digest` is that of the bits held at any moment; a change moves it by what it changes, so that checking a delta
costs what it changed and not a pass over the model. `check` leaves the bits alone; `apply` and `load` write them, and
after a failed `load` the bits are of no version. Held by tests/unit/deploy/test_weights_image.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from anabranch.kernels.delta_chunk import ChunkKind, Piece, read_head
from anabranch.kernels.delta_codec import TensorChange, apply_changes, decode, decode_chunk
from anabranch.kernels.delta_dtypes import FORMS, Bits
from anabranch.kernels.delta_plan import ArraySource
from anabranch.kernels.digest import Sums, add_sums, digest_of_sums, subtract_sums, sums_at, tensor_sums
from anabranch.kernels.workers import Workers
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.layout import Layout, root_digest


class Image:
    """All tensors of `layout`, zeros at first."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.bits: dict[str, Bits] = {t.name: np.zeros(t.numel, FORMS[t.dtype].uint) for t in layout.tensors}
        self._source = ArraySource(layout, self.bits)
        self._sums: dict[str, Sums] = {t.name: tensor_sums(self.bits[t.name][:0]) for t in layout.tensors}

    @property
    def digest(self) -> str:
        """Root digest, hex."""
        return self._digest({})

    def check(self, chunks: Sequence[bytes], workers: Workers) -> tuple[str, list[TensorChange]]:
        """The digest of the state that a delta's chunks make of this one, and the changes to get there.

        Raises DeltaError: a chunk is damaged, of another base, or two cover the same elements.
        """
        changes = decode(self.layout, chunks, self.bits, workers)
        return self._digest(self._moved(changes)), changes

    def apply(self, changes: Sequence[TensorChange]) -> None:
        self._sums |= self._moved(changes)
        apply_changes(self.bits, changes)

    def load(self, chunks: Iterable[bytes]) -> None:
        """Take the state of an anchor, one chunk at a time. Raises DeltaError: not a full snapshot, or damaged."""
        coverage = _Coverage(self.layout)
        for number, chunk in enumerate(chunks):
            self.apply(self._dense(number, chunk, coverage))
        coverage.check()

    def compare(self, chunks: Iterable[bytes]) -> None:
        """Raises DeltaError unless the chunks are a full snapshot of exactly this state."""
        coverage = _Coverage(self.layout)
        for number, chunk in enumerate(chunks):
            for change in self._dense(number, chunk, coverage):
                held = self.bits[change.name][change.start : change.start + change.bits.size]
                if not np.array_equal(held, change.bits):
                    raise DeltaError(f"chunk {number} holds other values of {change.name!r} than the deltas lead to")
        coverage.check()

    def _dense(self, number: int, chunk: bytes, coverage: _Coverage) -> list[TensorChange]:
        try:
            head = read_head(self.layout, chunk)
            if head.kind == ChunkKind.SPARSE:
                raise DeltaError("it is a change, not values")
            coverage.pieces += head.pieces
            return decode_chunk(self.layout, chunk, self._source)
        except DeltaError as error:
            raise DeltaError(f"chunk {number} is refused: {error}") from error

    def _moved(self, changes: Iterable[TensorChange]) -> dict[str, Sums]:
        moved: dict[str, Sums] = {}
        for change in changes:
            held = self.bits[change.name]
            if change.indices is None:
                old = tensor_sums(held[change.start : change.start + change.bits.size], change.start)
                new = tensor_sums(change.bits, change.start)
            else:
                old, new = sums_at(change.indices, held[change.indices]), sums_at(change.indices, change.bits)
            before = moved.get(change.name, self._sums[change.name])
            moved[change.name] = add_sums(subtract_sums(before, old), new)
        return moved

    def _digest(self, moved: dict[str, Sums]) -> str:
        sums = self._sums | moved
        return root_digest(self.layout, {name: digest_of_sums(of) for name, of in sums.items()})


class _Coverage:
    """Which elements the chunks of a snapshot hold."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.pieces: list[Piece] = []

    def check(self) -> None:
        """Raises DeltaError unless `pieces` cover every element once."""
        for a, b in pairwise(sorted(self.pieces, key=lambda p: (p.tensor, p.start))):
            if a.tensor == b.tensor and b.start < a.stop:
                raise DeltaError(f"two chunks hold {self._layout.tensors[a.tensor].name!r} at element {b.start}")
        held, all_elements = sum(p.size for p in self.pieces), sum(t.numel for t in self._layout.tensors)
        if held != all_elements:
            raise DeltaError(f"not a full snapshot: its chunks hold {held} of {all_elements} elements")
