"""A rank's share of the checkpoint: which pieces of which tensors are its own, and a host image of them.

Invariant: the shares of all ranks are disjoint and cover every element of the layout; each rank computes all of them
alone, from layout, world size and stage. A share has at most one piece of a tensor. Held by
tests/unit/learner/test_shares.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.delta_chunk import Piece
from anabranch.kernels.delta_dtypes import Bits, uint_dtype
from anabranch.schemas.layout import ALIGNMENT_BYTES, DTYPE_BYTES, Layout


@dataclass(frozen=True, slots=True)
class Whole:
    """Tensors of the layout that one rank must own whole, together: they come out of one conversion."""

    tensors: tuple[int, ...]


def split_evenly(layout: Layout, tensors: Iterable[int], wholes: Sequence[Whole], world_size: int) -> list[list[Piece]]:
    """Pieces of every rank when all ranks hold all weights: `wholes` go to whoever has least, in order, then the rest of
    `tensors` is cut into `world_size` contiguous stretches that level the ranks out. By number of elements."""
    shares: list[list[Piece]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for whole in wholes:
        rank = owner(loads)
        for tensor in whole.tensors:
            shares[rank].append(Piece(tensor, 0, layout.tensors[tensor].numel))
            loads[rank] += layout.tensors[tensor].numel
    rest = sorted(tensors)
    free = sum(layout.tensors[t].numel for t in rest)
    target = (free + sum(loads)) / world_size
    wanted = [max(0.0, target - load) for load in loads]
    ends = [round(free * part / (sum(wanted) or 1)) for part in itertools.accumulate(wanted)]
    ends[-1] = free
    rank, at = 0, 0
    for tensor in rest:
        start, numel = 0, layout.tensors[tensor].numel
        while start < numel:
            while at == ends[rank]:
                rank += 1
            stop = min(numel, start + ends[rank] - at)
            shares[rank].append(Piece(tensor, start, stop))
            at += stop - start
            start = stop
    return [in_order(share) for share in shares]


def owner(loads: Sequence[int]) -> int:
    """The rank with least."""
    return min(range(len(loads)), key=loads.__getitem__)


def partition(layout: Layout, tensor: int, rank: int, elements: int) -> list[Piece]:
    """What ZeRO-3 gives `rank` of a tensor, at `elements` a rank: the last part is cut short, one beyond the end is
    nothing."""
    numel = layout.tensors[tensor].numel
    start, stop = min(numel, rank * elements), min(numel, (rank + 1) * elements)
    return [Piece(tensor, start, stop)] if stop > start else []


def in_order(pieces: Iterable[Piece]) -> list[Piece]:
    return sorted(pieces, key=lambda p: (p.tensor, p.start))


class ShareImage:
    """The bits of a share in host memory, one flat buffer; a `Source` (kernels/delta_plan.py) of what lies in it."""

    def __init__(self, layout: Layout, pieces: Sequence[Piece], *, pinned: bool = False) -> None:
        self.layout, self.pieces = layout, tuple(pieces)
        sizes = [p.size * DTYPE_BYTES[layout.tensors[p.tensor].dtype] for p in self.pieces]
        ends = list(itertools.accumulate(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes))
        self._buffer = _host_bytes(ends[-1] if ends else 0, pinned=pinned)
        self._parts: dict[str, tuple[int, Bits]] = {}
        for piece, size, end in zip(self.pieces, sizes, ends, strict=True):
            spec = layout.tensors[piece.tensor]
            start = end - -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            if spec.name in self._parts:
                raise ValueError(f"a share has two pieces of {spec.name!r}")
            self._parts[spec.name] = piece.start, self._buffer[start : start + size].view(uint_dtype(spec.dtype))

    @property
    def nbytes(self) -> int:
        return int(self._buffer.nbytes)

    def bits(self, piece: Piece) -> Bits:
        """The array of `piece`, one of `pieces` or inside one; writable."""
        return self.read(self.layout.tensors[piece.tensor].name, piece.start, piece.stop)

    def read(self, name: str, start: int, stop: int) -> Bits:
        first, bits = self._parts[name]
        if not first <= start <= stop <= first + bits.size:
            raise ValueError(f"[{start}, {stop}) of {name!r} is not in this share")
        return bits[start - first : stop - first]

    def copy_from(self, other: ShareImage) -> None:
        """Take over the bits of an image of the same share."""
        np.copyto(self._buffer, other._buffer)


class ArrayShare:
    """A rank's share of weights that are arrays, split evenly: for tests and benchmarks. `state` (flat bits by name) may
    be changed at any time; `copy_to` reads it as it is then."""

    def __init__(self, layout: Layout, state: Mapping[str, Bits], *, rank: int = 0, world_size: int = 1) -> None:
        self.layout, self.state, self.rank, self.world_size = layout, state, rank, world_size
        self.pieces = tuple(split_evenly(layout, range(len(layout.tensors)), [], world_size)[rank])

    def image(self, *, pinned: bool = False) -> ShareImage:
        return ShareImage(self.layout, self.pieces)

    def copy_to(self, image: ShareImage) -> None:
        for piece in self.pieces:
            bits = self.state[self.layout.tensors[piece.tensor].name].reshape(-1)
            np.copyto(image.bits(piece), bits[piece.start : piece.stop])


def _host_bytes(size: int, *, pinned: bool) -> NDArray[np.uint8]:
    if not pinned:
        return np.zeros(size, np.uint8)
    import torch

    made: Any = torch.zeros(size, dtype=torch.uint8, pin_memory=True).numpy()
    return made  # type: ignore[no-any-return]
