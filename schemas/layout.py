"""The layout of a checkpoint: names, dtypes and shapes of its tensors, in one fixed order.

Invariant: two parties with the same `Layout.hash` agree on every tensor's name, dtype, shape and byte
offset in the flat image (the *mirror*), so a payload that names a layout hash cannot be applied to another
model. Names are Hugging Face checkpoint names; tied tensors appear once, under the name the checkpoint keeps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import xxhash

from anabranch.schemas.errors import ManifestError

DTYPE_BYTES = {
    "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "f8_e4m3": 1, "f8_e5m2": 1,
    "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "bool": 1,
}  # fmt: skip
MAX_TENSORS = 1_000_000
MAX_MIRROR_BYTES = 2**46  # 64 TiB: no model, but a number that is safe to compute with
ALIGNMENT_BYTES = 64  # each tensor starts on a cache line of the mirror


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: checkpoint name, dtype (a key of `DTYPE_BYTES`), shape, byte offset in the mirror."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def size_bytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Layout:
    """Tensors sorted by name, each aligned to `ALIGNMENT_BYTES` in a flat image of `mirror_bytes`."""

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def build(cls, specs: Iterable[tuple[str, str, tuple[int, ...]]]) -> Layout:
        """Lay out `(name, dtype, shape)` triples. Raises ManifestError on a duplicate name or bad dtype/shape."""
        tensors: list[TensorSpec] = []
        offset = 0
        for name, dtype, shape in sorted(specs, key=lambda spec: spec[0]):
            if dtype not in DTYPE_BYTES:
                raise ManifestError(f"tensor {name!r} has dtype {dtype!r}; known: {', '.join(DTYPE_BYTES)}")
            if any(type(n) is not int or n < 0 for n in shape):  # a bool is an int too
                raise ManifestError(f"tensor {name!r} has shape {shape}")
            if tensors and tensors[-1].name == name:
                raise ManifestError(f"tensor {name!r} appears twice in the layout")
            spec = TensorSpec(name, dtype, tuple(shape), offset)
            tensors.append(spec)
            offset += -(-spec.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if len(tensors) > MAX_TENSORS:
            raise ManifestError(f"{len(tensors)} tensors; the limit is {MAX_TENSORS}")
        if offset > MAX_MIRROR_BYTES:
            raise ManifestError(f"a layout of {offset} bytes; the limit is {MAX_MIRROR_BYTES}")
        return cls(tuple(tensors))

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        return {t.name: t for t in self.tensors}

    @cached_property
    def mirror_bytes(self) -> int:
        if not self.tensors:
            return 0
        last = self.tensors[-1]
        return last.offset_bytes + -(-last.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of all tensors without padding: what a full snapshot weighs before compression."""
        return sum(t.size_bytes for t in self.tensors)

    def to_json(self) -> str:
        return json.dumps([[t.name, t.dtype, list(t.shape)] for t in self.tensors], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Layout:
        """Inverse of `to_json`. Raises ManifestError if `text` is not a list of [name, dtype, shape]."""
        try:
            rows: Any = json.loads(text)
            specs = [(str(name), str(dtype), tuple(shape)) for name, dtype, shape in rows]
        except (ValueError, TypeError, RecursionError) as error:
            raise ManifestError(f"layout is not a JSON list of [name, dtype, shape]: {error}") from error
        return cls.build(specs)

    @cached_property
    def hash(self) -> str:
        """xxh3-128 of `to_json`, hex."""
        return xxhash.xxh3_128_hexdigest(self.to_json().encode())


def root_digest(layout: Layout, tensor_digests: dict[str, str]) -> str:
    """Tree digest of a model state: xxh3-128 over the layout hash and every tensor's digest in layout order.

    `tensor_digests` maps each name of the layout to its tensor's digest (`kernels.digest`, 32 hex digits).
    """
    root = xxhash.xxh3_128(layout.hash.encode())
    for spec in layout.tensors:
        root.update(bytes.fromhex(tensor_digests[spec.name]))
    return root.hexdigest()
