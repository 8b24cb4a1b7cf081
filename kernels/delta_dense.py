"""Bodies of dense chunks: all elements of some pieces, as byte planes, as one zstd frame, or as they are.

Invariant: `decode_dense` gives back exactly the elements, or raises DeltaError; what it allocates is in proportion to the
elements that the head of the chunk declares within the layout. Held by tests/property/test_delta_codec.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import zstandard
from numpy.typing import NDArray

from anabranch.kernels.byte_planes import from_planes, to_planes
from anabranch.kernels.delta_chunk import ChunkHead, ChunkKind, Piece, put_varint, take_varint, write_head
from anabranch.kernels.delta_dtypes import FORMS, Bits
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.layout import Layout

assert sys.byteorder == "little", "the codec views arrays as little-endian bytes"

RAW_PLANE, ZSTD_PLANE = 0, 1
SAMPLE = 32768  # elements by which a full trial of another kind is decided


def _frame(**parameters: int) -> zstandard.ZstdCompressionParameters:
    """No magic number and no content size: the chunk says both."""
    return zstandard.ZstdCompressionParameters(
        format=zstandard.FORMAT_ZSTD1_MAGICLESS, write_content_size=False, **parameters
    )


# Planes have no repeats worth finding, only skewed bytes: a match finder that gives up at once (7 bytes, 64 slots) leaves
# all to the entropy stage, which is 2.6 times as fast as level 1 and smaller (benchmarks/README.md).
_PLANE = _frame(
    strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, search_log=1, target_length=0, window_log=17
)
_LEVEL_1 = _frame(compression_level=1)


def encode_dense(layout: Layout, pieces: Sequence[Piece], bits: Bits, *, exhaustive: bool) -> bytes:
    """The smallest chunk that holds `bits` (all elements of `pieces`, one after another).

    With `exhaustive` every kind is tried in full; without it plain zstd only if a sample speaks for it.
    """
    form = FORMS[layout.tensors[pieces[0].tensor].dtype]
    bodies = {ChunkKind.PLANES: _planes_body(to_planes(bits, form))}
    if exhaustive or _sample_prefers_zstd(bits, form.width_bytes * SAMPLE):
        bodies[ChunkKind.ZSTD] = _compress(bits.view(np.uint8), _LEVEL_1)
    if min(map(len, bodies.values())) >= bits.nbytes:
        bodies = {ChunkKind.RAW: bits.tobytes()}
    kind = min(bodies, key=lambda k: len(bodies[k]))
    return bytes(write_head(layout, kind, pieces)) + bodies[kind]


def _sample_prefers_zstd(bits: Bits, sample_bytes: int) -> bool:
    middle = bits[max(0, bits.size // 2 - SAMPLE // 2) :][:SAMPLE]
    plain = len(_compress(middle.view(np.uint8), _LEVEL_1))
    return plain < 0.25 * min(sample_bytes, middle.nbytes)  # weights never: their mantissas are noise


def _planes_body(planes: NDArray[np.uint8]) -> bytes:
    body = bytearray()
    for plane in planes:
        packed = _compress(plane, _PLANE)
        if len(packed) + 3 < plane.size:
            body.append(ZSTD_PLANE)
            put_varint(body, len(packed))
            body += packed
        else:
            body.append(RAW_PLANE)
            body += plane.data
    return bytes(body)


def _compress(data: NDArray[np.uint8], parameters: zstandard.ZstdCompressionParameters) -> bytes:
    return zstandard.ZstdCompressor(compression_params=parameters).compress(data.data)


def decode_dense(head: ChunkHead, chunk: bytes) -> Bits:
    """All elements of the chunk's pieces, one after another. Raises DeltaError."""
    form = FORMS[head.dtype]
    n = head.elements
    body = memoryview(chunk)[head.body_at :]
    if head.kind == ChunkKind.RAW:
        return _exactly(body, n * form.width_bytes).view(form.uint)
    if head.kind == ChunkKind.ZSTD:
        return _decompress(body, n * form.width_bytes).view(form.uint)
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
    out = np.empty(n, form.uint)
    from_planes(planes, form, out)
    return out


def _exactly(data: memoryview, size: int) -> NDArray[np.uint8]:
    if len(data) != size:
        raise DeltaError(f"it holds {len(data)} bytes where {size} belong")
    return np.frombuffer(data, np.uint8)


def _decompress(frame: memoryview, size: int) -> NDArray[np.uint8]:
    try:
        decompressor = zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS)
        data = decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaError(f"it holds an unreadable zstd frame: {error}") from error
    return _exactly(memoryview(data), size)
