"""The stages of delta files, known by the heads of their chunks: who holds which elements, before anything is decoded.

Invariant: every chunk's digest and head have been checked, no two chunks of a stage share an element, and an anchor holds
every element of the model, once, as it is (not as a change). Of the chunks themselves nothing is kept. Held by
tests/unit/deploy/test_delta_stages.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anabranch.deploy.delta_progress import progress
from anabranch.deploy.delta_spans import Line, OwnedSpans
from anabranch.kernels.delta_chunk import ChunkHead, ChunkKind, read_head
from anabranch.kernels.delta_codec import CODEC
from anabranch.schemas.errors import DeltaError
from anabranch.transport.delta_file import DeltaFile


@dataclass(frozen=True)
class Stage:
    """One stage of `delta`: chunks `first`, `first` + 1, ... of the file are number 0, 1, ... here."""

    delta: DeltaFile
    first: int
    owned: OwnedSpans
    is_sparse: NDArray[np.bool_]

    def content(self, number: int) -> bytes:
        """The bytes of a chunk. Raises DeltaError if they do not have their digest."""
        return self.delta.chunk(self.first + number)


def read_stages(deltas: Sequence[DeltaFile]) -> list[Stage]:
    """The stages of all `deltas`, which are over one layout, in order; without those that have no chunks.

    Raises:
        DeltaError: another codec; a damaged chunk; chunks that overlap; an anchor that is no full snapshot.
    """
    return [stage for delta in deltas for stage in _stages(delta)]


def _stages(delta: DeltaFile) -> list[Stage]:
    manifest, line = delta.header.manifest, Line(delta.header.layout)
    if manifest.codec != CODEC:
        raise DeltaError(f"{delta.path} has codec {manifest.codec}; this program knows {CODEC}")
    stages = []
    with progress(f"reading {delta.path.name}", manifest.payload_bytes) as advance:
        for numbers in map(delta.stage, range(len(delta.header.stages))):
            owned, sparse = [], []
            for number in numbers:
                content = delta.chunk(number)
                head = _head(delta, number, content)
                owned.append(line.spans(head.pieces))
                sparse.append(head.kind is ChunkKind.SPARSE)
                advance(len(content))
            stages.append(Stage(delta, numbers.start, OwnedSpans(owned), np.array(sparse, bool)))
    for stage in stages:
        if shared := stage.owned.shared():
            a, b = (stage.first + number for number in shared[:2])
            raise DeltaError(f"{delta.path}: chunks {a} and {b} both hold elements of {line.name(shared[2])!r}")
    covered = sum(int(stage.owned.elements.sum()) for stage in stages)
    if manifest.kind == "anchor" and covered != line.elements:
        raise DeltaError(f"{delta.path} is an anchor of {line.elements} elements, but its chunks hold {covered}")
    return [stage for stage in stages if len(stage.owned)]


def _head(delta: DeltaFile, number: int, content: bytes) -> ChunkHead:
    with naming(delta, number):
        head = read_head(delta.header.layout, content)
        if head.kind is ChunkKind.SPARSE and delta.header.manifest.kind == "anchor":
            raise DeltaError("it holds changes, and an anchor has no base for them")
        return head


@contextmanager
def naming(delta: DeltaFile, chunk: int) -> Iterator[None]:
    """A DeltaError in the block says which chunk of which file it is about."""
    try:
        yield
    except DeltaError as error:
        raise DeltaError(f"{delta.path}: chunk {chunk}: {error}") from error
