"""The redo journal of an apply in place: everything that will be written, before any of it is.

Invariant: a journal under its own name is complete and absolute (it holds new bits, not differences), so writing it to the
checkpoint again, after a kill at any point, ends in the same bits. Each frame has its digest. It names the delta it is of,
and no other delta is applied while it is there. Held by tests/process/test_delta_in_place.py.

    8 bytes magic "ABREDO01" | u32 size of the JSON | xxh3-128 of magic, size and JSON | JSON: the fields of `JournalOf`
    frames: u32 tensor | u64 start | u64 elements | u8 kind | xxh3-128 of those and the body | body
    an end frame: tensor 2^32 − 1, start: the number of frames, elements 0

Kind 0 sets the elements [start, start + elements) to the body's bits; kind 1 has `elements` u32 offsets from `start`, then
as many bits. Little-endian. This file never leaves the machine.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from anabranch.kernels.delta_chunk import Piece
from anabranch.kernels.delta_dtypes import UINT, Bits
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.layout import DTYPE_BYTES, Layout
from anabranch.transport.aside import Aside
from anabranch.transport.checkpoint_io import OpenCheckpoint
from anabranch.transport.delta_file import DeltaFile
from anabranch.transport.files import sync_directory

MAGIC = b"ABREDO01"
_HEAD = struct.Struct("<8sI16s")
_HEAD_DIGESTED = struct.Struct("<8sI")
_FRAME = struct.Struct("<IQQB")
_DIGEST_BYTES = 16
_DENSE, _SPARSE = 0, 1
_END = 2**32 - 1
_MAX_JSON_BYTES = 2**16
_MAX_FRAME_ELEMENTS = 2**32


@dataclass(frozen=True)
class JournalOf:
    """Which delta a journal is of; `delta` is its file's identity, `name` what that file was called."""

    delta: str
    name: str
    layout_hash: str
    result_digest: str

    @classmethod
    def of(cls, delta: DeltaFile) -> JournalOf:
        manifest = delta.header.manifest
        return cls(delta.identity, delta.path.name, manifest.layout_hash, manifest.result_digest)


@dataclass(frozen=True)
class Redo:
    """New `bits` [K] of tensor `name`: at flat `indices` [K], or from element `start` on when `indices` is None."""

    name: str
    start: int
    indices: NDArray[np.int64] | None
    bits: Bits
    size_bytes: int

    def write_to(self, checkpoint: OpenCheckpoint) -> int:
        """Write it; returns `size_bytes`, which it took in the journal."""
        if self.indices is None:
            checkpoint.write(self.name, self.start, self.bits)
        else:
            checkpoint.patch(self.name, self.indices, self.bits)
        return self.size_bytes


class JournalWriter:
    """Writes a journal aside. Use it as a context manager; without `commit` nothing of it stays. Raises OSError."""

    def __init__(self, path: Path, what: JournalOf) -> None:
        self._aside = Aside(path)
        self._what = what
        self._frames = 0

    def __enter__(self) -> Self:
        self._aside.__enter__()
        try:
            self._file: IO[bytes] = self._aside.path.open("wb")
            text = json.dumps(asdict(self._what)).encode()
            start = _HEAD_DIGESTED.pack(MAGIC, len(text))
            self._file.write(start + xxhash.xxh3_128_digest(start + text) + text)
        except BaseException:
            self._aside.__exit__(None, None, None)
            raise
        return self

    def add(self, frames: list[bytes]) -> None:
        """Append what `changed_frames` made."""
        self._file.writelines(frames)
        self._frames += len(frames)

    def commit(self) -> None:
        """The journal is complete: put it under its name, on disk."""
        self._file.write(_frame(_END, self._frames, 0, _DENSE, b""))
        self._file.close()
        self._aside.commit(replace=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._file.close()
        finally:
            self._aside.__exit__(kind, error, tb)


def changed_frames(piece: Piece, old: Bits, new: Bits) -> list[bytes]:
    """Frames that turn `old` into `new`, the bits of `piece`: at most one."""
    offsets = np.flatnonzero(old != new)
    if offsets.size == 0:
        return []
    if offsets.size * (4 + new.itemsize) < new.nbytes:
        body = offsets.astype(np.uint32).tobytes() + new[offsets].tobytes()
        return [_frame(piece.tensor, piece.start, offsets.size, _SPARSE, body)]
    return [_frame(piece.tensor, piece.start, new.size, _DENSE, new.tobytes())]


class Journal:
    """A journal on disk, to be read through once. Raises DeltaError if it is damaged, OSError if it is not there."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path = path
        self._layout = layout
        self._file = path.open("rb")
        try:
            magic, size, digest = _HEAD.unpack(self._take(_HEAD.size))
            if magic != MAGIC or size > _MAX_JSON_BYTES:
                raise self._damaged()
            text = self._take(size)
            if xxhash.xxh3_128_digest(_HEAD_DIGESTED.pack(magic, size) + text) != digest:
                raise self._damaged()
            self.what = JournalOf(**json.loads(text))
        except BaseException:
            self._file.close()
            raise

    @property
    def size_bytes(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def frames(self) -> Iterator[Redo]:
        """What is to be written. Raises DeltaError where the journal is damaged."""
        for number in range(_END):
            head = self._take(_FRAME.size)
            tensor, start, elements, kind = _FRAME.unpack(head)
            digest = self._take(_DIGEST_BYTES)
            if tensor == _END:
                if start != number or xxhash.xxh3_128_digest(head) != digest:
                    raise self._damaged()
                return
            if tensor >= len(self._layout.tensors) or elements >= _MAX_FRAME_ELEMENTS:
                raise self._damaged()
            spec = self._layout.tensors[tensor]
            width = DTYPE_BYTES[spec.dtype]
            body = self._take(elements * (width + 4 * kind))
            if xxhash.xxh3_128_digest(head + body) != digest:
                raise self._damaged()
            indices = None
            if kind == _SPARSE:
                indices = np.frombuffer(body, np.uint32, elements).astype(np.int64) + start
            bits = np.frombuffer(body, UINT[width], elements, offset=4 * elements * kind)
            yield Redo(spec.name, start, indices, bits, len(head) + _DIGEST_BYTES + len(body))

    def remove(self) -> None:
        self.path.unlink()
        sync_directory(self.path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    def _take(self, count: int) -> bytes:
        if count > self.size_bytes - self._file.tell():
            raise self._damaged()
        return self._file.read(count)

    def _damaged(self) -> DeltaError:
        return DeltaError(
            f"{self.path} is damaged, so the apply that it is of cannot be ended: "
            "restore the checkpoint from a copy and remove that file"
        )


def _frame(tensor: int, start: int, elements: int, kind: int, body: bytes) -> bytes:
    head = _FRAME.pack(tensor, start, elements, kind)
    return head + xxhash.xxh3_128_digest(head + body) + body
