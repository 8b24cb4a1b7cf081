"""A step pair on disk, `PREFIX.base.safetensors` and `PREFIX.change.safetensors`, as old and new bits in memory.

Invariant: a pair that does not fit together (a change of an unknown tensor, indices that repeat or lie outside, bits of
another width, one half of an entry) is refused with an error that names file and tensor, before anything is measured.
Held by tests/unit/deploy/test_codec_pair.py.

The base holds every tensor before the step. The change holds, for each tensor `T` that changed, `T.index` (unsigned
flat indices, ascending) and `T.bits` (the new bit patterns, as wide as the tensor's dtype); a tensor without an entry
did not change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anabranch.kernels.delta_dtypes import Bits, uint_dtype
from anabranch.schemas.errors import DeltaError, UsageError
from anabranch.schemas.layout import Layout
from anabranch.transport.checkpoint_files import DTYPES

State = Mapping[str, Bits]  # the flat bits of every tensor

BASE_SUFFIX, CHANGE_SUFFIX = ".base.safetensors", ".change.safetensors"
_INDEX_DTYPES = {"U32": np.uint32, "U64": np.uint64, "I32": np.int32, "I64": np.int64}


@dataclass(frozen=True)
class Pair:
    """Two consecutive states over one layout; `base` and `new` map every name to its flat bits, in layout order."""

    name: str
    layout: Layout
    base: dict[str, Bits]
    new: dict[str, Bits]

    @property
    def dense_bytes(self) -> int:
        """Bytes of the whole new state: what encoding and decoding speeds are counted in."""
        return self.layout.payload_bytes

    @property
    def elements(self) -> int:
        return sum(bits.size for bits in self.new.values())

    def changed_elements(self) -> int:
        """Elements whose bits differ (an entry of the change file that repeats the old bits is no change)."""
        return sum(int(np.count_nonzero(self.base[name] != bits)) for name, bits in self.new.items())


@dataclass(frozen=True, slots=True)
class _Stored:
    dtype: str  # as safetensors writes it
    shape: tuple[int, ...]
    data: bytes


def load_pair(prefix: str) -> Pair:
    """Read the pair `prefix` (a path without the two endings) into memory.

    Raises:
        UsageError: one of the two files is missing or cannot be read.
        DeltaError: a file is no safetensors file, or the two do not fit together.
    """
    base_file, change_file = Path(prefix + BASE_SUFFIX), Path(prefix + CHANGE_SUFFIX)
    stored, changes = _read(base_file), _read(change_file)
    for name, tensor in stored.items():
        if tensor.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise DeltaError(f"{base_file}: tensor {name!r} has dtype {tensor.dtype}; known: {known}")
    layout = Layout.build((name, DTYPES[t.dtype], t.shape) for name, t in stored.items())
    entries = _entries(changes, stored, change_file)
    base: dict[str, Bits] = {}
    new: dict[str, Bits] = {}
    for spec in layout.tensors:
        kind = uint_dtype(spec.dtype)
        base[spec.name] = np.frombuffer(stored.pop(spec.name).data, kind).copy()
        new[spec.name] = base[spec.name].copy()
        if spec.name in entries:
            indices, bits = _entry(spec.name, *entries[spec.name], base[spec.name], change_file)
            new[spec.name][indices] = bits
    return Pair(Path(prefix).name, layout, base, new)


def _read(path: Path) -> dict[str, _Stored]:
    from safetensors import SafetensorError, deserialize

    try:
        tensors = deserialize(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(
            f"there is no {path}; --pair PREFIX stands for PREFIX{BASE_SUFFIX} and PREFIX{CHANGE_SUFFIX}"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    except (SafetensorError, ValueError) as error:
        raise DeltaError(f"{path} is no safetensors file: {error}") from error
    return {name: _Stored(t["dtype"], tuple(t["shape"]), bytes(t["data"])) for name, t in tensors}


def _entries(
    changes: Mapping[str, _Stored], stored: Mapping[str, _Stored], path: Path
) -> dict[str, tuple[_Stored, _Stored]]:
    """The two halves of every entry by tensor. A tensor's own name may end in `.index` or `.bits`: only the last part
    of an entry's name says which half it is."""
    halves: dict[str, dict[str, _Stored]] = {}
    for key, value in changes.items():
        name, _, half = key.rpartition(".")
        if half not in ("index", "bits") or not name:
            raise DeltaError(f"{path}: entry {key!r} is neither T.index nor T.bits of a tensor T")
        if name not in stored:
            raise DeltaError(f"{path}: entry {key!r} changes a tensor that the base does not hold")
        halves.setdefault(name, {})[half] = value
    for name, found in halves.items():
        if missing := {"index", "bits"} - found.keys():
            raise DeltaError(f"{path}: tensor {name!r} has no {name}.{missing.pop()}")
    return {name: (found["index"], found["bits"]) for name, found in halves.items()}


def _entry(name: str, index: _Stored, bits: _Stored, base: Bits, path: Path) -> tuple[NDArray[np.int64], Bits]:
    """Flat indices (int64, ascending) and new bits of one tensor, checked."""
    where = f"{path}: tensor {name!r}"
    if index.dtype not in _INDEX_DTYPES:
        raise DeltaError(f"{where}: its index is {index.dtype}; known: {', '.join(_INDEX_DTYPES)}")
    count = math.prod(index.shape)
    if len(index.shape) != 1 or bits.shape != index.shape:
        raise DeltaError(f"{where}: index {list(index.shape)} and bits {list(bits.shape)} are not two lists as long")
    if len(bits.data) != count * base.itemsize:
        raise DeltaError(f"{where}: its bits are {bits.dtype}, the base's are {8 * base.itemsize} bits wide")
    raw = np.frombuffer(index.data, _INDEX_DTYPES[index.dtype])
    if count and (int(raw.max()) >= base.size or int(raw.min()) < 0):
        outside = int(raw.max()) if int(raw.max()) >= base.size else int(raw.min())
        raise DeltaError(f"{where}: index {outside} is outside of its {base.size} elements")
    indices = raw.astype(np.int64)
    if np.any(np.diff(indices) <= 0):
        raise DeltaError(f"{where}: its indices do not ascend")
    return indices, np.frombuffer(bits.data, base.dtype)
