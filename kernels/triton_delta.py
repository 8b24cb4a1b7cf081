"""Sparse chunks of weights that are on a GPU: the passes over dense weights run there, the entropy stage on the CPU.

Invariant: `encode_sparse` gives the bytes and `decode_sparse` the changes of their namesakes in kernels/delta_sparse.py,
for the same bits. Held by tests/gpu/test_delta_gpu.py.

What crosses the bus is one bit for each element, to see where segments are cut, and the gaps and steps of the changes.
The segments of a chunk are put side by side in device memory, if there are several, so ranks run on from one to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.kernels.delta_chunk import ChunkHead, ChunkKind, Piece, put_varint, write_head
from anabranch.kernels.delta_dtypes import CLASSES, FORMS, BitForm
from anabranch.kernels.delta_sparse import Changes, Part, cut_segments, read_changes, write_changes
from anabranch.kernels.triton_bits import SIGNED, stepped, steps_between
from anabranch.kernels.triton_locate import select
from anabranch.kernels.triton_ranks import class_directory, ranks
from anabranch.kernels.triton_scan import scan
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.layout import Layout

NO_BITS = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class DevicePart:
    """A piece with its old and new bits ([n], see `flat_bits`), the indices of its changes (int64 [k], relative to the
    piece), all on one device, and the marks of the changes in host memory, as in the CPU's `Part`."""

    piece: Piece
    old: torch.Tensor
    new: torch.Tensor
    indices: torch.Tensor
    words: NDArray[np.uint64]

    @classmethod
    def compare(cls, piece: Piece, old: torch.Tensor, new: torch.Tensor) -> DevicePart:
        marks, indices = scan(old, new)
        return cls(piece, old, new, indices, marks.cpu().numpy().view(np.uint64))


def encode_sparse(layout: Layout, parts: Sequence[DevicePart]) -> bytes:
    """A sparse chunk of `parts`, which all have changes, are of one dtype and in order."""
    form = FORMS[layout.tensors[parts[0].piece.tensor].dtype]
    segments, old, moved = [], [], []  # moved: from an index in its piece to the place in what is side by side
    elements = 0
    for part in parts:
        for segment in cut_segments(Part(part.piece, NO_BITS, NO_BITS, part.words, part.indices.numel())):
            first = segment.piece.start - part.piece.start
            segments.append(segment)
            old.append(part.old[first : first + segment.piece.size])
            moved.append(elements - first)
            elements += segment.piece.size
    device = parts[0].old.device
    changed = torch.tensor([s.changed for s in segments], device=device)
    indices = torch.cat([p.indices for p in parts])
    indices += torch.repeat_interleave(torch.tensor(moved, device=device), changed, output_size=indices.numel())
    steps = torch.cat([steps_between(p.old[p.indices], p.new[p.indices], form) for p in parts])
    chunk = write_head(layout, ChunkKind.SPARSE, [s.piece for s in segments])
    put_varint(chunk, indices.numel())
    return bytes(chunk) + write_changes(group_changes(_side_by_side(old), indices, steps, form))


def _side_by_side(segments: Sequence[torch.Tensor]) -> torch.Tensor:
    return segments[0] if len(segments) == 1 else torch.cat(list(segments))


def group_changes(old: torch.Tensor, indices: torch.Tensor, steps: torch.Tensor, form: BitForm) -> Changes:
    """The changes of a chunk with old bits `old` [n], grouped by class, in host memory.

    `indices` int64 [k], ascending, are the changed elements, `steps` [k] their steps in the order of values.
    """
    classes, places = ranks(old, indices, class_directory(old, form), form)
    classes, order = torch.sort(classes, stable=True)
    places = places[order]
    gaps = places.clone()
    same_class = classes[1:] == classes[:-1]
    gaps[1:] -= torch.where(same_class, places[:-1] + 1, 0)
    counts = torch.bincount(classes, minlength=CLASSES)
    return Changes(counts.cpu().numpy(), gaps.cpu().numpy().view(np.uint32), steps[order].cpu().numpy().view(form.uint))


def decode_sparse(
    head: ChunkHead, chunk: bytes, read_old: Callable[[Piece], torch.Tensor]
) -> list[tuple[Piece, torch.Tensor, torch.Tensor]]:
    """For every piece with changes: their indices in it (int64 [k], ascending) and new bits [k], on the device of what
    `read_old` returns (`flat_bits` of a piece). Raises DeltaError."""
    changes = read_changes(head, chunk)
    indices, bits = locate(_side_by_side([read_old(piece) for piece in head.pieces]), changes, FORMS[head.dtype])
    ends = np.cumsum([piece.size for piece in head.pieces])
    edges = torch.searchsorted(indices, torch.tensor(ends, device=indices.device)).tolist()
    found = []
    for piece, end, first, last in zip(head.pieces, ends.tolist(), [0, *edges], edges, strict=False):
        if last > first:
            found.append((piece, indices[first:last] - (end - piece.size), bits[first:last]))
    return found


def locate(old: torch.Tensor, changes: Changes, form: BitForm) -> tuple[torch.Tensor, torch.Tensor]:
    """The changes of a chunk with old bits `old` [n]: indices (int64 [k], ascending) and new bits [k].

    Raises:
        DeltaError: they do not all exist in `old`.
    """
    assert not changes.counts[form.exponent_mask + 1 :].any()  # read_changes refuses such classes
    k = changes.gaps.size
    counts = torch.tensor(changes.counts, device=old.device)
    classes = torch.repeat_interleave(
        torch.arange(CLASSES, dtype=torch.uint8, device=old.device), counts, output_size=k
    )
    passed = torch.cumsum(torch.tensor(changes.gaps.astype(np.int64) + 1, device=old.device), 0)
    start_of_class = torch.cumsum(counts, 0) - counts
    before_class = torch.cat([passed.new_zeros(1), passed])[start_of_class]
    places = passed - before_class[classes.long()] - 1
    directory = class_directory(old, form)
    missing = int((places >= directory[-1][classes.long()]).sum())
    if missing:
        raise DeltaError(f"{missing} of its {k} changes do not exist in the base weights")
    indices, order = torch.sort(select(old, classes, places.to(torch.int32), directory, form))
    steps = torch.tensor(changes.steps.view(f"i{form.width_bytes}"), device=old.device)[order]
    assert steps.dtype == SIGNED[form.width_bytes]
    return indices, stepped(old[indices], steps, form)
