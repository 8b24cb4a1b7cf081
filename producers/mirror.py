"""A host mirror: a copy of the checkpoint as one flat image in shared memory. The one that follows the channel and is
shared by a node's producers is `node_mirror.py`.

Invariant: the image holds the exact bits of every tensor of its layout at `offset_bytes`, and `digest()` is the root
digest of those bits, since every write goes through `apply` or `write` (or is announced by `touch`). The memory has no name: it
goes when the last process that maps it ends, however that ends. Held by tests/unit/producers/test_mirror.py.

bf16 is stored as its 16 bits (`uint16`), f32 as `uint32` and so on: nothing here is a float.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.delta_codec import TensorChange
from anabranch.kernels.delta_dtypes import uint_dtype
from anabranch.kernels.digest import tensor_digest
from anabranch.producers.checkpoint import checkpoint_tensors
from anabranch.schemas.errors import DeltaError, ModelMismatchError
from anabranch.schemas.layout import Layout, TensorSpec, root_digest


class SharedMemory:
    """`size_bytes` of anonymous shared memory, readable by other processes of the same user through `path`."""

    def __init__(self, name: str, size_bytes: int) -> None:
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(self._fd, max(size_bytes, 1))
        self.data: NDArray[np.uint8] = np.frombuffer(mmap.mmap(self._fd, max(size_bytes, 1)), np.uint8)[:size_bytes]

    @property
    def path(self) -> str:
        """Valid while this object is open; opening it needs the same user (or ptrace rights)."""
        if self._fd < 0:
            raise ValueError("the shared memory is closed")
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Give up the descriptor. Views of `data` stay valid; the memory goes with the last of them."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


def map_shared(path: str, size_bytes: int, *, writable: bool = False) -> NDArray[np.uint8]:
    """Map `size_bytes` of the shared memory at `path` (uint8 [size_bytes]); writes reach it only if `writable`.

    Raises:
        DeltaError: it cannot be opened (its process ended) or is smaller than `size_bytes`.
    """
    try:
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError as error:
        raise DeltaError(f"shared memory {path} cannot be opened: {error.strerror}") from error
    try:
        if os.fstat(fd).st_size < size_bytes:
            raise DeltaError(f"shared memory {path} is smaller than the {size_bytes} bytes of its layout")
        # A private mapping for readers: torch takes only writable arrays, and a stray write stays in this process.
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
        return np.frombuffer(mmap.mmap(fd, max(size_bytes, 1), access=access), np.uint8)[:size_bytes]
    finally:
        os.close(fd)


def tensor_bits(image: NDArray[np.uint8], spec: TensorSpec) -> NDArray[Any]:
    """The elements of tensor `spec` inside a flat image, as unsigned integers of the dtype's width [numel]."""
    raw = image[spec.offset_bytes : spec.offset_bytes + spec.size_bytes]
    return raw.view(uint_dtype(spec.dtype))


class SharedImage(Protocol):
    """What an engine needs of a mirror: its layout, and where the image can be mapped (see `map_shared`)."""

    @property
    def layout(self) -> Layout: ...

    @property
    def path(self) -> str: ...


class Mirror:
    """A writable flat image of a checkpoint with incremental digests. Zero-filled until written."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._memory = SharedMemory("anabranch-mirror", layout.mirror_bytes)
        self._digests: dict[str, str] = {}  # of tensors that have not changed since

    @classmethod
    def from_checkpoint(cls, model_dir: Path) -> Mirror:
        """The mirror of a safetensors checkpoint (sharded or not); tied tensors once. Errors as `checkpoint_tensors`."""
        stored = checkpoint_tensors(model_dir)
        mirror = cls(Layout.build((t.name, t.dtype, t.shape) for t in stored))
        for tensor in stored:
            mirror.tensor_bytes(tensor.name)[:] = tensor.read()
        return mirror

    @property
    def image(self) -> NDArray[np.uint8]:
        """The whole image, uint8 [layout.mirror_bytes]. After writing through it, call `touch`."""
        return self._memory.data

    @property
    def path(self) -> str:
        """Where another process of the same user can map the image (see `map_shared`)."""
        return self._memory.path

    def spec(self, name: str) -> TensorSpec:
        try:
            return self.layout.by_name[name]
        except KeyError:
            raise ModelMismatchError(f"the layout has no tensor {name!r}") from None

    def tensor_bytes(self, name: str) -> NDArray[np.uint8]:
        """View of the tensor's bytes, uint8 [size_bytes]. After writing through it, call `touch`."""
        spec = self.spec(name)
        return self.image[spec.offset_bytes : spec.offset_bytes + spec.size_bytes]

    def tensor_bits(self, name: str) -> NDArray[Any]:
        """View of the tensor's elements as unsigned integers [numel]. After writing through it, call `touch`."""
        return tensor_bits(self.image, self.spec(name))

    def apply(self, changes: Iterable[TensorChange]) -> None:
        """Set tensors, ranges of them or single elements to new bit patterns.

        Raises:
            ModelMismatchError: no such tensor.
            DeltaError: wrong width, length, or an index outside its tensor. Nothing at all is written then.
        """
        changes = list(changes)
        for change in changes:
            check_change(self.tensor_bits(change.name), change)
        for change in changes:
            self.touch(change.name)
            self.tensor_bits(change.name)[places(change)] = change.bits

    def write(self, name: str, indices: NDArray[np.int64] | None, bits: NDArray[Any]) -> None:
        """`apply` of one change: `bits` [K] or [numel] unsigned integers, at flat `indices` [K] or everywhere (None)."""
        if indices is None and bits.size != self.spec(name).numel:
            raise DeltaError(f"{name}: {bits.size} elements do not fill its {self.spec(name).numel}")
        self.apply([TensorChange(name, indices, bits)])

    def touch(self, *names: str) -> None:
        """Announce that these tensors were written through a view, so that their digests are taken anew."""
        for name in names:
            self._digests.pop(name, None)

    def tensor_digest(self, name: str) -> str:
        """Digest of the tensor's bits, 32 hex digits; computed once per change."""
        known = self._digests.get(name)
        if known is None:
            known = self._digests[name] = tensor_digest(self.tensor_bits(name))
        return known

    def digest(self) -> str:
        """Root digest of the state; only tensors changed since the last call are hashed."""
        return root_digest(self.layout, {t.name: self.tensor_digest(t.name) for t in self.layout.tensors})

    def close(self) -> None:
        self._memory.close()


def places(change: TensorChange) -> slice | NDArray[np.int64]:
    """Where in its tensor's flat bits `change` writes."""
    return slice(change.start, change.start + change.bits.size) if change.indices is None else change.indices


def check_change(target: NDArray[Any], change: TensorChange) -> None:
    """Raises DeltaError unless `change` fits the flat bits `target` of its tensor: width, length, every index."""
    indices, bits = change.indices, change.bits
    room = target
    if indices is None:
        room = target[change.start : change.start + bits.size] if change.start >= 0 else target[:0]
    expected = len(room) if indices is None else len(indices)
    if bits.dtype != target.dtype or bits.shape != (expected,):
        raise DeltaError(f"{change.name}: {bits.dtype}{list(bits.shape)} does not fit {target.dtype}[{expected}]")
    if indices is not None and expected and (int(indices.min()) < 0 or int(indices.max()) >= len(target)):
        raise DeltaError(f"{change.name}: an index is outside its {len(target)} elements")


def layout_of_checkpoint(model_dir: Path) -> Layout:
    """The layout of a safetensors checkpoint, read from the headers alone; tied tensors once."""
    return Layout.build((t.name, t.dtype, t.shape) for t in checkpoint_tensors(model_dir))
