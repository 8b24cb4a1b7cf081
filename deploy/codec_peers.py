"""Four delta formats of other systems, written as well as each scheme allows, to compare ours with.

Invariant: `decode` over the base's bits gives the exact new bits for every dtype width and any number of threads, and
`encode` returns the complete file (counts, lengths, digest), so sizes compare like with like.
Held by tests/unit/deploy/test_codec_peers.py.

- `int32+bf16`: a flat int32 index and the new bits of each changed element, uncompressed (sparse weight updates of TRL,
  verl and vLLM).
- `u16gap+bf16+zstd1`: u16 distance to the element before, and the new bits (PULSE family).
- `xor+zstd1`: old XOR new of every element (slime, SkyRL).
- `gap+xor+zstd1`: u16 distances, and old XOR new of the changed elements (NeMo style).

Where a scheme leaves room it is used in its favour. Streams run over all tensors, so that no gap starts anew and small
tensors cost nothing; gaps and values are compressed apart, which is smaller than one after the other; dense XOR is
compressed in blocks that fit level 1's tables (a fifth smaller than whole tensors when changes are rare). A longer gap
than 16 bits hold is a filler of two bytes without a value. No byte planes: none of the four has them. With more threads
the elements are split into as many runs.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from anabranch.deploy.codec_pair import State
from anabranch.kernels.delta_dtypes import Bits
from anabranch.kernels.workers import Workers
from anabranch.schemas.errors import DeltaError

ZSTD_LEVEL = 1
XOR_BLOCK_BYTES = 128 * 1024
_FILLER = 0xFFFF  # as a gap: that many elements are passed and none is changed
_MAGIC = b"PEER"
_HEAD = struct.Struct("<4sI")
_DIGEST_BYTES = 16


class Format(Protocol):
    """What the benchmark measures: three timed or counted steps, and `prepare`, which is not timed."""

    name: str

    def prepare(self, base: State, new: State) -> tuple[State, State]:
        """What `encode` is given; a private copy where the format spoils its input."""
        ...

    def encode(self, base: State, new: State, workers: Workers) -> Any: ...

    def size_bytes(self, encoded: Any) -> int:
        """Bytes of the complete file."""
        ...

    def decode(self, state: dict[str, Bits], encoded: Any, workers: Workers) -> State:
        """The new state. `state` holds the base's bits and may be written to."""
        ...


class Span(NamedTuple):
    """Elements [start, stop) of tensor `name`."""

    name: str
    start: int
    stop: int


class Peer:
    """Framing that the four share; a subclass codes one run of elements of equal width.

    A file is the magic, the number of runs (u32), the length of each (u64), the runs, and the xxh3-128 of all that.
    """

    name = ""

    def prepare(self, base: State, new: State) -> tuple[State, State]:
        return base, new

    def encode(self, base: State, new: State, workers: Workers) -> bytes:
        runs = split_runs(new, workers.threads)
        bodies = list(workers.in_order(lambda spans: self.encode_run(base, new, spans), runs))
        lengths = struct.pack(f"<{len(bodies)}Q", *map(len, bodies))
        file = b"".join([_HEAD.pack(_MAGIC, len(bodies)), lengths, *bodies])
        return file + xxhash.xxh3_128_digest(file)

    def size_bytes(self, encoded: bytes) -> int:
        return len(encoded)

    def decode(self, state: dict[str, Bits], encoded: bytes, workers: Workers) -> State:
        content = memoryview(encoded)[:-_DIGEST_BYTES]
        if xxhash.xxh3_128_digest(content) != encoded[-_DIGEST_BYTES:]:
            raise DeltaError(f"{self.name}: the digest does not match")
        _, count = _HEAD.unpack_from(content)
        ends = [
            *itertools.accumulate(struct.unpack_from(f"<{count}Q", content, _HEAD.size), initial=_HEAD.size + 8 * count)
        ]
        bodies = [content[start:stop] for start, stop in itertools.pairwise(ends)]
        jobs = list(zip(split_runs(state, workers.threads), bodies, strict=True))
        list(workers.in_order(lambda job: self.decode_run(state, *job), jobs))
        return state

    def encode_run(self, base: State, new: State, spans: Sequence[Span]) -> bytes:
        raise NotImplementedError

    def decode_run(self, state: State, spans: Sequence[Span], body: memoryview) -> None:
        raise NotImplementedError


class IndexValue(Peer):
    name = "int32+bf16"

    def encode_run(self, base: State, new: State, spans: Sequence[Span]) -> bytes:
        found = [_changes(base, new, [span]) for span in spans]
        counts = np.array([at.size for at, _, _ in found], np.uint64)
        return b"".join([
            counts.tobytes(), *(at.astype(np.int32).tobytes() for at, _, _ in found),
            *(bits.tobytes() for _, _, bits in found),
        ])  # fmt: skip

    def decode_run(self, state: State, spans: Sequence[Span], body: memoryview) -> None:
        counts = np.frombuffer(body, np.uint64, len(spans)).astype(np.int64)
        total, offset = int(counts.sum()), 8 * len(spans)
        indices = np.frombuffer(body, np.int32, total, offset)
        bits = np.frombuffer(body, _dtype(state, spans), total, offset + 4 * total)
        for span, stop, count in zip(spans, np.cumsum(counts), counts, strict=True):
            state[span.name][span.start : span.stop][indices[stop - count : stop]] = bits[stop - count : stop]


class GapValue(Peer):
    name = "u16gap+bf16+zstd1"
    xor = False

    def encode_run(self, base: State, new: State, spans: Sequence[Span]) -> bytes:
        at, old, bits = _changes(base, new, spans)
        gaps = _compress(to_gaps(at))
        return struct.pack("<Q", len(gaps)) + gaps + _compress(old ^ bits if self.xor else bits)

    def decode_run(self, state: State, spans: Sequence[Span], body: memoryview) -> None:
        (length,) = struct.unpack_from("<Q", body)
        at = from_gaps(np.frombuffer(_decompress(body[8 : 8 + length]), np.uint16))
        bits = np.frombuffer(_decompress(body[8 + length :]), _dtype(state, spans))
        ends = np.cumsum([span.stop - span.start for span in spans])
        cuts = [0, *np.searchsorted(at, ends)]
        for span, end, first, last in zip(spans, ends, cuts, cuts[1:], strict=False):
            here = state[span.name][span.start : span.stop]
            where = at[first:last] - (end - (span.stop - span.start))
            here[where] = here[where] ^ bits[first:last] if self.xor else bits[first:last]


class GapXor(GapValue):
    name = "gap+xor+zstd1"
    xor = True


class DenseXor(Peer):
    name = "xor+zstd1"

    def encode_run(self, base: State, new: State, spans: Sequence[Span]) -> bytes:
        size = sum(span.stop - span.start for span in spans)
        difference = np.empty(size, _dtype(new, spans))
        for (name, start, stop), out in _along(spans, difference):
            np.bitwise_xor(base[name][start:stop], new[name][start:stop], out=out)
        raw = memoryview(difference).cast("B")
        blocks = [_compress(raw[i : i + XOR_BLOCK_BYTES]) for i in range(0, len(raw), XOR_BLOCK_BYTES)]
        return b"".join([struct.pack(f"<{len(blocks)}I", *map(len, blocks)), *blocks])

    def decode_run(self, state: State, spans: Sequence[Span], body: memoryview) -> None:
        difference = np.empty(sum(span.stop - span.start for span in spans), _dtype(state, spans))
        raw = memoryview(difference).cast("B")
        count = -(-len(raw) // XOR_BLOCK_BYTES)
        offset = 4 * count
        for i, length in enumerate(struct.unpack_from(f"<{count}I", body)):
            block = _decompress(body[offset : offset + length])
            raw[i * XOR_BLOCK_BYTES : i * XOR_BLOCK_BYTES + len(block)] = block
            offset += length
        for (name, start, stop), part in _along(spans, difference):
            np.bitwise_xor(state[name][start:stop], part, out=state[name][start:stop])


def peers() -> list[Format]:
    """The four, in the order of the table."""
    return [IndexValue(), GapValue(), DenseXor(), GapXor()]


def split_runs(state: State, runs: int) -> list[list[Span]]:
    """The elements of `state` in up to `runs` runs of about equal length for each element width; the same on both
    sides."""
    out: list[list[Span]] = []
    for width in sorted({bits.itemsize for bits in state.values()}):
        here = {name: bits.size for name, bits in state.items() if bits.itemsize == width and bits.size}
        total, offset = sum(here.values()), 0
        cuts = [total * i // runs for i in range(runs + 1)]
        parts: list[list[Span]] = [[] for _ in range(runs)]
        for name, size in here.items():
            for part, (low, high) in zip(parts, itertools.pairwise(cuts), strict=True):
                start, stop = max(low - offset, 0), min(high - offset, size)
                if start < stop:
                    part.append(Span(name, start, stop))
            offset += size
        out += [part for part in parts if part]
    return out


def to_gaps(at: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Ascending positions (int64 [n]) as u16 gaps: elements passed since the last one, with fillers before long ones."""
    passed = np.diff(at, prepend=-1) - 1
    fillers, rest = np.divmod(passed, _FILLER)
    gaps = np.full(at.size + int(fillers.sum()), _FILLER, np.uint16)
    gaps[np.cumsum(fillers + 1) - 1] = rest
    return gaps


def from_gaps(gaps: NDArray[np.uint16]) -> NDArray[np.int64]:
    """Inverse of `to_gaps`."""
    lands = gaps != _FILLER
    return (np.cumsum(gaps.astype(np.int64) + lands) - 1)[lands]


def _changes(base: State, new: State, spans: Sequence[Span]) -> tuple[NDArray[np.int64], Bits, Bits]:
    """Positions along `spans` (int64 [n], ascending) of the elements that differ, their old and their new bits."""
    positions, old, bits, offset = [], [], [], 0
    for name, start, stop in spans:
        was, now = base[name][start:stop], new[name][start:stop]
        at = np.flatnonzero(was != now)
        positions.append(at + offset)
        old.append(was[at])
        bits.append(now[at])
        offset += stop - start
    return np.concatenate(positions), np.concatenate(old), np.concatenate(bits)


def _along(spans: Sequence[Span], flat: Bits) -> list[tuple[Span, Bits]]:
    """Each span with its part of `flat`, which lies along all of them."""
    ends = [*itertools.accumulate((span.stop - span.start for span in spans), initial=0)]
    return [(span, flat[a:b]) for span, (a, b) in zip(spans, itertools.pairwise(ends), strict=True)]


def _dtype(state: State, spans: Sequence[Span]) -> np.dtype[Any]:
    return state[spans[0].name].dtype


def _compress(data: Bits | memoryview) -> bytes:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(memoryview(data).cast("B") if len(data) else b"")


def _decompress(data: memoryview) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)
