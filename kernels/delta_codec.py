"""The lossless weight delta, codec `class-golomb/1`: from two states to chunks, and from chunks and the old state back.

Invariant: `decode(layout, encode_delta(layout, base, new).chunks, base)` over `base` gives the exact bits of `new`: bits
are compared, not floats, and new bit patterns are handed out (−0.0, NaN payloads and denormals included), so applying
them twice is the same as applying them once. Chunks decode independently of each other, and come out the same for any
number of threads. A delta must be decoded over the base that it was made from: the manifest's base digest says which.
Docs: docs/delta-format.md. Held by tests/property/test_delta_codec.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.delta_chunk import ChunkHead, ChunkKind, Piece, read_head
from anabranch.kernels.delta_dense import decode_dense, encode_dense
from anabranch.kernels.delta_dtypes import FORMS, Bits
from anabranch.kernels.delta_plan import ArraySource, Source, flat_bits, plan_jobs
from anabranch.kernels.delta_scan import scan
from anabranch.kernels.delta_sparse import Part, decode_sparse, encode_sparse, read_changes
from anabranch.kernels.workers import Workers
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.layout import Layout

CODEC = "class-golomb/1"
DENSE_FROM = 1 / 8  # share of changed elements from which both codings are tried
SMALL_BYTES = 2**16  # a change of so little memory is handed out element by element in any case
ALONE_FROM = 2**16  # elements from which a densely changed piece has a chunk of its own


@dataclass(frozen=True, slots=True)
class JobResult:
    """Chunks of one job and how many elements changed, by index of the tensor (a snapshot: all). `parts` are the pieces
    with changes, marked; their bits are what `base` and `new` gave (a snapshot: none)."""

    chunks: tuple[bytes, ...]
    changed: Mapping[int, int]
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Encoded:
    """Chunks on the wire and what they change: elements in all, names, and elements of each tensor of the layout."""

    chunks: tuple[bytes, ...]
    changed_elements: int
    changed_tensors: tuple[str, ...]
    changed_by_tensor: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorChange:
    """New `bits` of tensor `name`: at flat `indices` (int64, ascending), or, when `indices` is None, of its elements
    [start, start + len(bits)). A tensor that lies in several chunks has several."""

    name: str
    indices: NDArray[np.int64] | None
    bits: Bits
    start: int = 0


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """What a chunk says without its base; `unit_steps` counts steps of ±1 (0 for dense chunks)."""

    kind: str
    dtype: str
    pieces: tuple[Piece, ...]
    changed_elements: int
    unit_steps: int


def encode_job(layout: Layout, job: Sequence[Piece], base: Source | None, new: Source) -> JobResult:
    """The chunks of one job: none if nothing changed. `base` None makes a full snapshot."""
    read = [(p, layout.tensors[p.tensor].name) for p in job]
    if base is None:
        bits = [new.read(name, p.start, p.stop) for p, name in read]
        chunk = encode_dense(layout, job, bits, exhaustive=False)
        return JobResult((chunk,), _count((p, p.size) for p in job))
    parts = [_part(p, base.read(name, p.start, p.stop), new.read(name, p.start, p.stop)) for p, name in read]
    return _encode_parts(layout, [p for p in parts if p.changed])


def _part(piece: Piece, old: Bits, new: Bits) -> Part:
    return Part(piece, old, new, *scan(old, new))


def _encode_parts(layout: Layout, parts: Sequence[Part]) -> JobResult:
    chunks: list[bytes] = []
    sparse: list[Part] = []
    dense: list[Part] = []
    for part in parts:
        if part.changed < DENSE_FROM * part.piece.size:
            sparse.append(part)
            continue
        alone = encode_sparse(layout, [part])
        whole = encode_dense(layout, [part.piece], [part.new], exhaustive=True)
        if part.piece.size >= ALONE_FROM:
            chunks.append(min(alone, whole, key=len))
        else:
            (sparse if len(alone) <= len(whole) else dense).append(part)
    if sparse:
        chunks.append(encode_sparse(layout, sparse))
    if dense:
        chunks.append(encode_dense(layout, [p.piece for p in dense], [p.new for p in dense], exhaustive=True))
    return JobResult(tuple(chunks), _count((p.piece, p.changed) for p in parts), tuple(parts))


def _count(changes: Iterable[tuple[Piece, int]]) -> dict[int, int]:
    changed: dict[int, int] = {}
    for piece, count in changes:
        changed[piece.tensor] = changed.get(piece.tensor, 0) + count
    return changed


def encode_anchor(layout: Layout, state: Mapping[str, Bits], workers: Workers | None = None) -> Encoded:
    """A full snapshot. `state` maps every name of `layout` to its flat bits. Raises DeltaError as `ArraySource`."""
    return _encode(layout, None, ArraySource(layout, state), workers)


def encode_delta(
    layout: Layout, base: Mapping[str, Bits], new: Mapping[str, Bits], workers: Workers | None = None
) -> Encoded:
    """What changes from `base` to `new` (flat bits by name, both over all of `layout`). Raises DeltaError."""
    return _encode(layout, ArraySource(layout, base), ArraySource(layout, new), workers)


def _encode(layout: Layout, base: Source | None, new: Source, workers: Workers | None) -> Encoded:
    changed = [0] * len(layout.tensors)
    chunks: list[bytes] = []
    for result in (workers or Workers()).in_order(lambda job: encode_job(layout, job, base, new), plan_jobs(layout)):
        chunks += result.chunks
        for tensor, count in result.changed.items():
            changed[tensor] += count
    names = tuple(t.name for t, count in zip(layout.tensors, changed, strict=True) if count)
    return Encoded(tuple(chunks), sum(changed), names, tuple(changed))


def decode_chunk(layout: Layout, chunk: bytes, base: Source) -> list[TensorChange]:
    """The changes in one chunk, all checked against `layout`. Reads `base` only if the chunk is sparse.

    Raises:
        DeltaError: it is damaged, not of this layout, or does not belong to these base weights.
    """
    return _decode_chunk(layout, read_head(layout, chunk), chunk, base)


def _decode_chunk(layout: Layout, head: ChunkHead, chunk: bytes, base: Source) -> list[TensorChange]:
    name = {p.tensor: layout.tensors[p.tensor].name for p in head.pieces}
    changes = []
    if head.kind == ChunkKind.SPARSE:
        read = {p: base.read(name[p.tensor], p.start, p.stop) for p in head.pieces}
        for piece, indices, bits in decode_sparse(head, chunk, read.__getitem__):
            changes.append(_change(name[piece.tensor], piece, read[piece], indices, bits))
        return changes
    body, at = decode_dense(head, chunk), 0
    for piece in head.pieces:
        bits = np.empty(piece.size, FORMS[head.dtype].uint)
        body.write(at, bits)
        changes.append(TensorChange(name[piece.tensor], None, bits, piece.start))
        at += piece.size
    return changes


def _change(name: str, piece: Piece, old: Bits, indices: NDArray[np.uint32], bits: Bits) -> TensorChange:
    """As single elements, or, where their indices would take more memory than the whole piece, as the piece."""
    if indices.size * 8 + bits.nbytes < max(old.nbytes, SMALL_BYTES):
        return TensorChange(name, np.add(indices, piece.start, dtype=np.int64), bits)
    new = old.copy()
    new[indices] = bits
    return TensorChange(name, None, new, piece.start)


def decode_anchor(
    layout: Layout, chunks: Sequence[bytes], state: Mapping[str, Bits], workers: Workers | None = None
) -> None:
    """Fill `state` (flat writable arrays over all of `layout`) from a snapshot's chunks, one chunk of memory at a time.

    Raises:
        DeltaError: a chunk is damaged or sparse, or the chunks do not cover every element once. Heads are checked before
            anything is written; a damaged body is found when its turn comes, so `state` is in doubt then.
    """
    arrays = {spec.name: flat_bits(state, spec) for spec in layout.tensors}
    heads = check_disjoint(layout, chunks)
    sparse = [i for i, head in enumerate(heads) if head.kind == ChunkKind.SPARSE]
    covered = sum(head.elements for head in heads)
    if sparse or covered != sum(t.numel for t in layout.tensors):
        raise DeltaError(f"not a full snapshot: its chunks cover {covered} elements, {len(sparse)} of them are sparse")

    def one(i: int) -> None:
        try:
            body = decode_dense(heads[i], chunks[i])
        except DeltaError as error:
            raise DeltaError(f"chunk {i} is refused: {error}") from error
        at = 0
        for piece in heads[i].pieces:
            body.write(at, arrays[layout.tensors[piece.tensor].name][piece.start : piece.stop])
            at += piece.size

    for _ in (workers or Workers()).in_order(one, range(len(chunks))):
        pass


def decode(
    layout: Layout, chunks: Sequence[bytes], base: Mapping[str, Bits], workers: Workers | None = None
) -> list[TensorChange]:
    """Every change in `chunks`, over the old bits `base`; all are checked before any is returned.

    Raises:
        DeltaError: a chunk as `decode_chunk`, with its number; two chunks that cover the same elements.
    """
    source = ArraySource(layout, base)

    heads = check_disjoint(layout, chunks)

    def one(i: int) -> list[TensorChange]:
        try:
            return _decode_chunk(layout, heads[i], chunks[i], source)
        except DeltaError as error:
            raise DeltaError(f"chunk {i} is refused: {error}") from error

    return [c for changes in (workers or Workers()).in_order(one, range(len(chunks))) for c in changes]


def apply_changes(state: Mapping[str, Bits], changes: Iterable[TensorChange]) -> None:
    """Write `changes` (decoded, hence checked) into the flat arrays of `state`."""
    for change in changes:
        if change.indices is None:
            state[change.name][change.start : change.start + change.bits.size] = change.bits
        else:
            state[change.name][change.indices] = change.bits


def check_disjoint(layout: Layout, chunks: Sequence[bytes]) -> list[ChunkHead]:
    """The heads of `chunks`. Raises DeltaError if one is malformed or two chunks cover the same element."""
    heads = [_head(layout, i, chunk) for i, chunk in enumerate(chunks)]
    covered = sorted((p.tensor, p.start, p.stop, i) for i, head in enumerate(heads) for p in head.pieces)
    for (tensor, _, stop, i), (other, start, _, j) in itertools.pairwise(covered):
        if tensor == other and start < stop:
            raise DeltaError(f"chunks {i} and {j} both change {layout.tensors[tensor].name!r} at element {start}")
    return heads


def _head(layout: Layout, number: int, chunk: bytes) -> ChunkHead:
    try:
        return read_head(layout, chunk)
    except DeltaError as error:
        raise DeltaError(f"chunk {number} is refused: {error}") from error


def inspect_chunk(layout: Layout, chunk: bytes) -> ChunkInfo:
    """What `chunk` says without its base. Raises DeltaError if it is damaged or not of this layout."""
    head = read_head(layout, chunk)
    if head.kind != ChunkKind.SPARSE:
        decode_dense(head, chunk)
        return ChunkInfo("dense", head.dtype, head.pieces, head.elements, 0)
    steps: Any = read_changes(head, chunk).steps
    unit = int(np.count_nonzero((steps == 1) | (steps == np.iinfo(steps.dtype).max)))
    return ChunkInfo("sparse", head.dtype, head.pieces, int(steps.size), unit)
