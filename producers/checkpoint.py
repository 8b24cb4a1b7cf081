"""Reading a Hugging Face checkpoint folder: which tensors its safetensors files hold, and their bytes.

Invariant: each tensor of the model appears once, under the name that `save_pretrained` keeps: when `config.json` ties
the word embeddings and a file stores `lm_head.weight` as well, the copy is left out (and refused if it differs).
Held by tests/unit/producers/test_mirror.py.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.schemas.errors import ModelMismatchError
from anabranch.schemas.layout import DTYPE_BYTES, Layout
from anabranch.transport.files import read_json

_DTYPES = {
    "BF16": "bf16", "F16": "f16", "F32": "f32", "F64": "f64", "F8_E4M3": "f8_e4m3", "F8_E5M2": "f8_e5m2",
    "I64": "i64", "I32": "i32", "I16": "i16", "I8": "i8", "U8": "u8", "BOOL": "bool",
}  # fmt: skip
_MAX_HEADER_BYTES = 100 * 2**20
OUTPUT_EMBEDDING, INPUT_EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a safetensors file: where its bytes lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def read(self) -> NDArray[np.uint8]:
        """Its bytes, uint8 [size_bytes], in memory of their own."""
        return np.fromfile(self.file, np.uint8, count=self.size_bytes, offset=self.offset_bytes)


def checkpoint_tensors(model_dir: Path) -> list[StoredTensor]:
    """All tensors of the checkpoint in `model_dir`, sorted by name.

    Raises:
        ModelMismatchError: no safetensors there, a damaged file, a shard that lacks a tensor, tied tensors that differ.
    """
    found = {t.name: t for file in _files(model_dir) for t in _read_header(file)}
    index = _index(model_dir)
    missing = sorted(set(index) - set(found)) if index else []
    if missing:
        raise ModelMismatchError(f"{model_dir}: the index names {missing[0]!r}, which no shard holds")
    if OUTPUT_EMBEDDING in found and INPUT_EMBEDDING in found and _ties_embeddings(model_dir):
        if not np.array_equal(found[OUTPUT_EMBEDDING].read(), found[INPUT_EMBEDDING].read()):
            raise ModelMismatchError(
                f"{model_dir}: config.json ties the embeddings, but {OUTPUT_EMBEDDING} and {INPUT_EMBEDDING} differ"
            )
        del found[OUTPUT_EMBEDDING]
    return [found[name] for name in sorted(found)]


def first_difference(ours: Layout, theirs: Layout) -> str:
    """Where the layout of the weights (`theirs`) departs from the model's (`ours`), in words."""
    for name in sorted(ours.by_name.keys() | theirs.by_name.keys()):
        a, b = ours.by_name.get(name), theirs.by_name.get(name)
        if a is None or b is None:
            return f"tensor {name!r} is {'not in the model' if a is None else 'missing from the weights'}"
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"tensor {name!r} is {a.dtype}{list(a.shape)} in the model, {b.dtype}{list(b.shape)} in the weights"
    return "the layouts differ"


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or {} if there is no such file. Raises ModelMismatchError if it is damaged."""
    if not path.exists():
        return {}
    value = read_json(path, refuse=ModelMismatchError)
    if not isinstance(value, dict):
        raise ModelMismatchError(f"{path} is not a JSON object")
    return value


def _index(model_dir: Path) -> dict[str, str]:
    weight_map: dict[str, str] = read_object(model_dir / "model.safetensors.index.json").get("weight_map", {})
    return weight_map


def _files(model_dir: Path) -> list[Path]:
    names = sorted(set(_index(model_dir).values())) or ["model.safetensors"]
    files = [model_dir / Path(name).name for name in names]
    for file in files:
        if not file.is_file():
            raise ModelMismatchError(f"{model_dir} is not a safetensors checkpoint: there is no {file.name} in it")
    return files


def _ties_embeddings(model_dir: Path) -> bool:
    config = read_object(model_dir / "config.json")
    return bool(config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings", False)))


def _read_header(file: Path) -> list[StoredTensor]:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (header_bytes,) = struct.unpack("<Q", stream.read(8))
            if header_bytes > min(size, _MAX_HEADER_BYTES):
                raise ValueError(f"a header of {header_bytes} bytes")
            header = json.loads(stream.read(header_bytes))
        tensors = []
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            tensor = StoredTensor(
                name, _DTYPES[entry["dtype"]], tuple(entry["shape"]), file, 8 + header_bytes + int(begin)
            )
            if tensor.size_bytes != end - begin or tensor.offset_bytes + tensor.size_bytes > size:
                raise ValueError(f"tensor {name!r} does not lie inside the file")
            tensors.append(tensor)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelMismatchError(f"{file} is not a readable safetensors file: {error!r}") from error
    return tensors
