"""Where the codec reads weights from, and how it cuts a model into jobs.

Invariant: the jobs of `plan_jobs` cover every element once, are bounded in size, and depend on the layout (and the pieces
asked for) alone, so that chunks are the same for any number of threads. Held by tests/property/test_delta_codec.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from anabranch.kernels.delta_chunk import Piece
from anabranch.kernels.delta_dtypes import FORMS, Bits
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.layout import Layout, TensorSpec

CHUNK_ELEMENTS = 2**22  # at most, of a chunk: 8 MiB of bf16


class Source(Protocol):
    """Where weights are read from, piece by piece; several threads may read at once."""

    def read(self, name: str, start: int, stop: int) -> Bits:
        """Elements [start, stop) of a tensor: 1-D, C-contiguous, unsigned integers of its width; may be a view."""
        ...


class ArraySource:
    """Weights in memory: `state` maps names to flat arrays of unsigned integers."""

    def __init__(self, layout: Layout, state: Mapping[str, Bits]) -> None:
        """Raises DeltaError if an array is missing, not contiguous, or not what the layout says."""
        self._flat = {spec.name: flat_bits(state, spec) for spec in layout.tensors}

    def read(self, name: str, start: int, stop: int) -> Bits:
        return self._flat[name][start:stop]


def flat_bits(state: Mapping[str, Bits], spec: TensorSpec) -> Bits:
    """The bits of `spec` in `state`, flat. Raises DeltaError if they are missing, not contiguous, or not what it says."""
    bits = state.get(spec.name)
    if bits is None:
        raise DeltaError(f"tensor {spec.name!r} is missing")
    if not bits.flags.c_contiguous:
        raise DeltaError(f"tensor {spec.name!r} is not contiguous: copy it first (numpy.ascontiguousarray)")
    if bits.dtype != FORMS[spec.dtype].uint or bits.size != spec.numel:
        raise DeltaError(
            f"tensor {spec.name!r} holds {bits.size} x {bits.dtype}; the layout says {spec.numel} x {spec.dtype}"
        )
    return bits.reshape(-1)


def plan_jobs(
    layout: Layout, *, pieces: Iterable[Piece] | None = None, chunk_elements: int = CHUNK_ELEMENTS
) -> list[tuple[Piece, ...]]:
    """All elements of `layout`, or of its `pieces` (ascending and disjoint), in jobs that are encoded on their own: each
    of one dtype and of nearly equal size, at most `chunk_elements`. Jobs of a dtype walk the tensors in order, each
    tensor's pieces in order."""
    if pieces is None:
        pieces = (Piece(i, 0, t.numel) for i, t in enumerate(layout.tensors))
    of_dtype: dict[str, list[Piece]] = {dtype: [] for dtype in FORMS}
    for piece in pieces:
        if piece.size:
            of_dtype[layout.tensors[piece.tensor].dtype].append(piece)
    jobs: list[tuple[Piece, ...]] = []
    for given in of_dtype.values():
        total = sum(piece.size for piece in given)
        if not total:
            continue
        size = -(-total // -(-total // chunk_elements))
        job: list[Piece] = []
        room = size
        for whole in given:
            start = whole.start
            while start < whole.stop:
                piece = Piece(whole.tensor, start, min(whole.stop, start + room))
                job.append(piece)
                room -= piece.size
                start = piece.stop
                if room == 0:
                    jobs.append(tuple(job))
                    job, room = [], size
        if job:
            jobs.append(tuple(job))
    return jobs
