"""A lossless weight delta in one straightforward format, `sparse-zstd/1`.

Invariant: `decode(encode(base, new))` over `base` gives the exact bits of `new`, since values travel absolutely (new
bit patterns, compared and stored as unsigned integers: −0.0, NaN payloads and denormals included). Nothing is
allocated beyond what the layout allows, and every count and index is checked before anything is returned. Held by
tests/property/test_delta_codec.py.

A payload is a list of chunks that decode independently; each covers whole tensors of at most about
`CHUNK_DENSE_BYTES`. A chunk is one zstd frame of little-endian

    magic "ABD1" | u32 records | records x (u32 tensor index in the layout, u8 mode, u64 count) | bodies

with mode 1, sparse: `count` gaps (index − previous index − 1, u32, as four byte planes) and `count` new bit patterns
(as byte planes); mode 2, dense: all elements of the tensor as byte planes. Unchanged tensors have no record. Byte
planes put all low bytes first, then all next bytes, so that exponents compress.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from anabranch.schemas.errors import DeltaError
from anabranch.schemas.layout import DTYPE_BYTES, Layout, TensorSpec

CODEC = "sparse-zstd/1"
CHUNK_DENSE_BYTES = 64 * 2**20
MAGIC = b"ABD1"
_HEAD = struct.Struct("<4sI")
_RECORD = struct.Struct("<IBQ")
_SPARSE, _DENSE = 1, 2
UINT: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # by width

Bits = NDArray[Any]  # flat unsigned integers as wide as the tensor's dtype


@dataclass(frozen=True, slots=True)
class Encoded:
    """Chunks on the wire, and how many elements they change."""

    chunks: tuple[bytes, ...]
    changed_elements: int
    changed_tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorChange:
    """New `bits` of tensor `name`: at flat `indices` (int64, ascending), or of all elements when `indices` is None."""

    name: str
    indices: NDArray[np.int64] | None
    bits: Bits


def uint_dtype(dtype: str) -> type[np.unsignedinteger[Any]]:
    """The unsigned integer as wide as layout dtype `dtype`."""
    return UINT[DTYPE_BYTES[dtype]]


def encode_anchor(layout: Layout, state: Mapping[str, Bits], *, zstd_level: int = 1) -> Encoded:
    """A full snapshot. `state` maps every name of `layout` to its flat bits."""
    changes = (TensorChange(t.name, None, _flat(state, t)) for t in layout.tensors)
    return _encode(layout, changes, zstd_level)


def encode_delta(layout: Layout, base: Mapping[str, Bits], new: Mapping[str, Bits], *, zstd_level: int = 1) -> Encoded:
    """What changes from `base` to `new` (flat bits by name, both over all of `layout`); bits are compared, not floats."""
    return _encode(layout, _diff(layout, base, new), zstd_level)


def _diff(layout: Layout, base: Mapping[str, Bits], new: Mapping[str, Bits]) -> Iterator[TensorChange]:
    for spec in layout.tensors:
        old_bits, new_bits = _flat(base, spec), _flat(new, spec)
        indices = np.flatnonzero(old_bits != new_bits)
        if indices.size == 0:
            continue
        width = DTYPE_BYTES[spec.dtype]
        if indices.size * (width + 1.5) >= spec.size_bytes:  # a gap costs about 1.5 bytes after zstd
            yield TensorChange(spec.name, None, new_bits)
        else:
            yield TensorChange(spec.name, indices.astype(np.int64), new_bits[indices])


def _encode(layout: Layout, changes: Iterable[TensorChange], zstd_level: int) -> Encoded:
    compressor = zstandard.ZstdCompressor(level=zstd_level, write_content_size=True)
    position = {t.name: i for i, t in enumerate(layout.tensors)}
    chunks: list[bytes] = []
    names: list[str] = []
    elements = dense_bytes = 0
    records: list[bytes] = []
    bodies: list[bytes] = []

    def flush() -> None:
        nonlocal dense_bytes
        if records:
            head = _HEAD.pack(MAGIC, len(records))
            chunks.append(compressor.compress(b"".join([head, *records, *bodies])))
        records.clear()
        bodies.clear()
        dense_bytes = 0

    for change in changes:
        spec = layout.by_name[change.name]
        if dense_bytes and dense_bytes + spec.size_bytes > CHUNK_DENSE_BYTES:
            flush()
        dense_bytes += spec.size_bytes
        mode = _DENSE if change.indices is None else _SPARSE
        records.append(_RECORD.pack(position[change.name], mode, change.bits.size))
        if change.indices is not None:
            gaps = np.diff(change.indices, prepend=-1) - 1
            if gaps.size and int(gaps.max()) > 0xFFFF_FFFF:
                raise DeltaError(f"tensor {change.name!r}: a gap of {int(gaps.max())} does not fit 32 bits")
            bodies.append(_to_planes(gaps.astype(np.uint32)))
        bodies.append(_to_planes(change.bits))
        elements += change.bits.size
        names.append(change.name)
    flush()
    return Encoded(tuple(chunks), elements, tuple(names))


def decode(layout: Layout, chunks: Sequence[bytes]) -> list[TensorChange]:
    """Every change in `chunks`, checked against `layout` before any is returned.

    Raises:
        DeltaError: not this format, larger than the layout allows, an unknown or repeated tensor, a bad count or index.
    """
    changes: list[TensorChange] = []
    seen: set[str] = set()
    for number, chunk in enumerate(chunks):
        for change in _decode_chunk(layout, chunk, f"chunk {number}"):
            if change.name in seen:
                raise DeltaError(f"chunk {number} repeats tensor {change.name!r}")
            seen.add(change.name)
            changes.append(change)
    return changes


def _decode_chunk(layout: Layout, chunk: bytes, where: str) -> Iterator[TensorChange]:
    limit = _HEAD.size + sum(_RECORD.size + t.numel * (4 + DTYPE_BYTES[t.dtype]) for t in layout.tensors)
    try:
        declared = zstandard.get_frame_parameters(chunk).content_size
        if declared > limit:  # an unknown size is 2**64 − 1 and fails here as well
            raise DeltaError(f"{where} declares {declared} bytes; the layout allows {limit}")
        raw = memoryview(zstandard.ZstdDecompressor().decompress(chunk, max_output_size=limit, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise DeltaError(f"{where} is not a readable zstd frame: {error}") from error
    if len(raw) < _HEAD.size:
        raise DeltaError(f"{where} is too short")
    magic, count = _HEAD.unpack_from(raw)
    if magic != MAGIC:
        raise DeltaError(f"{where} starts with {bytes(magic)!r}, not {MAGIC!r}")
    cursor = _HEAD.size + count * _RECORD.size
    if count > len(layout.tensors) or cursor > len(raw):
        raise DeltaError(f"{where} announces {count} records")
    for i in range(count):
        index, mode, elements = _RECORD.unpack_from(raw, _HEAD.size + i * _RECORD.size)
        if index >= len(layout.tensors):
            raise DeltaError(f"{where} names tensor {index} of {len(layout.tensors)}")
        spec = layout.tensors[index]
        if mode not in (_SPARSE, _DENSE) or elements > spec.numel or (mode == _DENSE and elements != spec.numel):
            raise DeltaError(f"{where}, tensor {spec.name!r}: mode {mode} with {elements} of {spec.numel} elements")
        indices = None
        if mode == _SPARSE:
            gaps, cursor = _from_planes(raw, cursor, elements, np.uint32, where)
            indices = np.cumsum(gaps.astype(np.int64) + 1) - 1
            if elements and int(indices[-1]) >= spec.numel:
                raise DeltaError(f"{where}, tensor {spec.name!r}: index {int(indices[-1])} of {spec.numel}")
        bits, cursor = _from_planes(raw, cursor, elements, uint_dtype(spec.dtype), where)
        yield TensorChange(spec.name, indices, bits)
    if cursor != len(raw):
        raise DeltaError(f"{where} has {len(raw) - cursor} bytes left over")


def _to_planes(values: Bits) -> bytes:
    little = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<"), copy=False))
    return little.view(np.uint8).reshape(-1, values.dtype.itemsize).T.tobytes()


def _from_planes(raw: memoryview, cursor: int, count: int, dtype: Any, where: str) -> tuple[Bits, int]:
    width = np.dtype(dtype).itemsize
    end = cursor + count * width
    if end > len(raw):
        raise DeltaError(f"{where} ends in the middle of a tensor")
    planes = np.frombuffer(raw[cursor:end], dtype=np.uint8).reshape(width, count)
    little = np.ascontiguousarray(planes.T).reshape(-1).view(np.dtype(dtype).newbyteorder("<"))
    return little.astype(dtype, copy=False), end


def _flat(state: Mapping[str, Bits], spec: TensorSpec) -> Bits:
    bits = state[spec.name].reshape(-1)
    if bits.dtype != uint_dtype(spec.dtype) or bits.size != spec.numel:
        raise DeltaError(
            f"tensor {spec.name!r} holds {bits.size} x {bits.dtype}; the layout says {spec.numel} x {spec.dtype}"
        )
    return bits
