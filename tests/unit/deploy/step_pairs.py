"""A small step pair of several dtypes, as files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
CHANGED = 402  # elements, of the pair below


def write(path: Path, tensors: dict[str, tuple[str, list[int], Array]]) -> None:
    """A safetensors file of (dtype, shape, bits)."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape, bits) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + bits.nbytes]}
        offset += bits.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(bits.tobytes() for _, _, bits in tensors.values()))


def base_tensors() -> dict[str, tuple[str, list[int], Array]]:
    random = np.random.default_rng(0)
    wide = (random.normal(0, 0.02, 100_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return {
        "b.weight": ("BF16", [100, 1000], wide),
        "a.index": ("F32", [40], random.normal(0, 1, 40).astype(np.float32).view(np.uint32)),
        "quiet": ("F8_E4M3", [8, 8], np.arange(64, dtype=np.uint8)),
        "scalar": ("F16", [], np.array([0x8000], np.uint16)),
    }


def change_tensors() -> dict[str, tuple[str, list[int], Array]]:
    at = np.arange(7, 100_000, 250, dtype=np.uint32)
    new = base_tensors()["b.weight"][2][at] + np.uint16(1)
    return {
        "b.weight.index": ("U32", [at.size], at),
        "b.weight.bits": ("U16", [at.size], new),
        "a.index.index": ("U32", [2], np.array([0, 39], np.uint32)),
        "a.index.bits": ("U32", [2], np.array([0x7FC00001, 0x80000000], np.uint32)),  # a NaN's payload, −0
        "scalar.index": ("U32", [1], np.array([0], np.uint32)),
        "scalar.bits": ("U16", [1], np.array([0x8000], np.uint16)),  # as before: an entry, but no change
    }


def write_pair(folder: Path) -> str:
    """The pair on disk; returns its prefix, which holds a blank and a dot."""
    (folder / "a folder").mkdir()
    prefix = str(folder / "a folder" / "step.1")
    write(Path(prefix + ".base.safetensors"), base_tensors())
    write(Path(prefix + ".change.safetensors"), change_tensors())
    return prefix
