"""Bodies of dense chunks: all elements of some pieces, as byte planes, as one zstd frame, or as they are.

Invariant: `decode_dense` gives back exactly the elements, or raises DeltaError; what it allocates is in proportion to the
elements that the head of the chunk declares within the layout. Held by tests/property/test_delta_codec.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from anabranch.kernels.byte_planes import from_planes, to_planes
from anabranch.kernels.delta_chunk import ChunkHead, ChunkKind, Piece, put_varint, take_varint, write_head
from anabranch.kernels.delta_dtypes import FORMS, BitForm, Bits
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.layout import Layout

assert sys.byteorder == "little", "the codec views arrays as little-endian bytes"

Buffer = bytes | bytearray | memoryview
RAW_PLANE, ZSTD_PLANE = 0, 1
MAX_WINDOW_BYTES = 2**20  # of a zstd frame: a decoder allocates what a frame asks for, up to this
SAMPLE = 32768  # elements by which a full trial of another kind is decided


def _frame(**parameters: int) -> zstandard.ZstdCompressionParameters:
    """No magic number and no content size: the chunk says both."""
    return zstandard.ZstdCompressionParameters(
        format=zstandard.FORMAT_ZSTD1_MAGICLESS, write_content_size=False, **parameters
    )


# Planes have no repeats worth finding, only skewed bytes: a match finder that gives up at once (7 bytes, 64 slots) leaves
# all to the entropy stage. Of the exponents of a real model: 690 MB/s and 2.65 bits each, where level 1 takes 2.92 bits at
# 264 MB/s and their entropy is 2.65 (benchmarks/README.md, Plane parameters).
_PLANE = _frame(
    strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, search_log=1, target_length=0, window_log=17
)
_LEVEL_1 = _frame(compression_level=1, window_log=19)


def encode_dense(layout: Layout, pieces: Sequence[Piece], arrays: Sequence[Bits], *, exhaustive: bool) -> bytes:
    """The smallest chunk that holds `arrays`, all elements of each of `pieces`.

    With `exhaustive` every kind is tried in full; without it plain zstd only if a sample speaks for it.
    """
    form = FORMS[layout.tensors[pieces[0].tensor].dtype]
    planes = np.empty((form.width_bytes, sum(p.size for p in pieces)), np.uint8)
    at = 0
    for bits in arrays:
        to_planes(bits, form, planes[:, at : at + bits.size])
        at += bits.size
    bodies: dict[ChunkKind, list[Buffer]] = {ChunkKind.PLANES: _plane_parts(planes, exhaustive)}
    if exhaustive or _sample_prefers_zstd(max(arrays, key=len)):
        bodies[ChunkKind.ZSTD] = [_compress(_bytes_of(arrays), _LEVEL_1)]
    sizes = {kind: sum(map(len, parts)) for kind, parts in bodies.items()}
    kind = min(sizes, key=sizes.__getitem__)
    if sizes[kind] >= planes.nbytes:
        kind = ChunkKind.RAW
        bodies[kind] = [_bytes_of(arrays).data]
    return b"".join([write_head(layout, kind, pieces), *bodies[kind]])


def _bytes_of(arrays: Sequence[Bits]) -> NDArray[np.uint8]:
    return (arrays[0] if len(arrays) == 1 else np.concatenate(arrays)).view(np.uint8)


def _sample_prefers_zstd(bits: Bits) -> bool:
    """Never of weights, whose mantissas are noise; of masks, tables and constants."""
    sample = _spread(bits)
    return len(_compress(sample.view(np.uint8), _LEVEL_1)) < 0.25 * sample.nbytes


def _spread(values: NDArray[Any]) -> NDArray[Any]:
    """SAMPLE values from 16 places all over, or all if there are not many more."""
    if values.size < 2 * SAMPLE:
        return values
    return values[: values.size // 16 * 16].reshape(16, -1)[:, : SAMPLE // 16].reshape(-1)


def _plane_parts(planes: NDArray[np.uint8], exhaustive: bool) -> list[Buffer]:
    parts: list[Buffer] = []
    for plane in planes:
        packed = _compress(plane, _PLANE) if exhaustive or not _is_noise(plane) else None
        if packed is not None and len(packed) + 3 < plane.size:
            head = bytearray([ZSTD_PLANE])
            put_varint(head, len(packed))
            parts += [head, packed]
        else:
            parts += [bytes([RAW_PLANE]), plane.data]
    return parts


def _is_noise(plane: NDArray[np.uint8]) -> bool:
    """Whether a sample from all over the plane does not shrink: mantissas."""
    sample = _spread(plane)
    return sample.size < plane.size and len(_compress(sample, _PLANE)) > 0.98 * sample.size


def _compress(data: NDArray[np.uint8], parameters: zstandard.ZstdCompressionParameters) -> bytes:
    return zstandard.ZstdCompressor(compression_params=parameters).compress(data.data)


@dataclass(frozen=True, slots=True)
class DenseBody:
    """All elements of a dense chunk, checked: still as `planes` (uint8 [n] each), or `flat` [n]."""

    form: BitForm
    planes: Sequence[NDArray[np.uint8]]
    flat: Bits | None

    def write(self, start: int, out: Bits) -> None:
        """Fill `out` with the elements from `start` on."""
        if self.flat is None:
            from_planes([plane[start : start + out.size] for plane in self.planes], self.form, out)
        else:
            out[:] = self.flat[start : start + out.size]


def decode_dense(head: ChunkHead, chunk: bytes) -> DenseBody:
    """The body of a dense chunk. Raises DeltaError."""
    form = FORMS[head.dtype]
    n = head.elements
    body = memoryview(chunk)[head.body_at :]
    if head.kind == ChunkKind.RAW:
        return DenseBody(form, (), _exactly(body, n * form.width_bytes).view(form.uint))
    if head.kind == ChunkKind.ZSTD:
        return DenseBody(form, (), _decompress(body, n * form.width_bytes).view(form.uint))
    planes, at = [], 0
    for _ in range(form.width_bytes):
        if at >= len(body):
            raise DeltaError("it ends before its last plane")
        method = body[at]
        at += 1
        if method == RAW_PLANE:
            planes.append(_exactly(body[at : at + n], n))
            at += n
        elif method == ZSTD_PLANE:
            size, at = take_varint(body, at)
            if size > len(body) - at:
                raise DeltaError("it ends in the middle of a plane")
            planes.append(_decompress(body[at : at + size], n))
            at += size
        else:
            raise DeltaError(f"a plane is stored in unknown way {method}")
    if at != len(body):
        raise DeltaError(f"it has {len(body) - at} bytes left over")
    return DenseBody(form, planes, None)


def _exactly(data: memoryview, size: int) -> NDArray[np.uint8]:
    if len(data) != size:
        raise DeltaError(f"it holds {len(data)} bytes where {size} belong")
    return np.frombuffer(data, np.uint8)


def _decompress(frame: memoryview, size: int) -> NDArray[np.uint8]:
    form = zstandard.FORMAT_ZSTD1_MAGICLESS
    try:
        asked = zstandard.get_frame_parameters(frame, format=form)
        # The library would allocate a declared content size, whatever max_output_size says, and the window.
        if asked.content_size != zstandard.CONTENTSIZE_UNKNOWN or asked.has_checksum or asked.dict_id:
            raise DeltaError("it holds a zstd frame with a size, a checksum or a dictionary")
        if asked.window_size > MAX_WINDOW_BYTES:
            raise DeltaError(f"it holds a zstd frame with a window of {asked.window_size} bytes")
        data = zstandard.ZstdDecompressor(format=form).decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaError(f"it holds an unreadable zstd frame: {error}") from error
    return _exactly(memoryview(data), size)
