"""Where the bytes of a checkpoint lie: one .safetensors file, or a Hugging Face folder of them.

Invariant: each tensor of the model appears once, under the name that `save_pretrained` keeps, with every place where
its bytes are stored: when a folder's `config.json` ties the word embeddings and a file stores `lm_head.weight` as well,
that copy is a second place of the input embedding (and refused if it differs). Places lie inside their files and do not
overlap. Held by tests/unit/transport/test_checkpoint_files.py.

Source: the safetensors format, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.schemas.delta_file import MAGIC
from anabranch.schemas.errors import AnabranchError
from anabranch.schemas.layout import DTYPE_BYTES, Layout

DTYPES = {
    "BF16": "bf16", "F16": "f16", "F32": "f32", "F64": "f64", "F8_E4M3": "f8_e4m3", "F8_E5M2": "f8_e5m2",
    "I64": "i64", "I32": "i32", "I16": "i16", "I8": "i8", "U8": "u8", "BOOL": "bool",
}  # fmt: skip
SAFETENSORS_NAMES = {ours: theirs for theirs, ours in DTYPES.items()}
LENGTH = struct.Struct("<Q")  # the first bytes of a file: how long its JSON header is
_MAX_HEADER_BYTES = 100 * 2**20
_COMPARED_BYTES = 16 * 2**20
OUTPUT_EMBEDDING, INPUT_EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_JOURNAL = ".anabranch-apply"
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


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


@dataclass(frozen=True)
class CheckpointFiles:
    """The checkpoint at `path`: a file, or a folder when `is_folder`.

    `files` are its safetensors files in order; `places` maps each name to where the tensor is stored, tied copies after
    the first.
    """

    path: Path
    is_folder: bool
    files: tuple[Path, ...]
    places: dict[str, tuple[StoredTensor, ...]]
    layout: Layout


def journal_path(path: Path) -> Path:
    """Where `anabranch delta apply --in-place` keeps what is still to be written to the checkpoint at `path`."""
    return path / _JOURNAL if path.is_dir() else path.with_name(f".{path.name}{_JOURNAL}")


def scan_checkpoint(path: Path, *, refuse: type[AnabranchError], half_applied: bool = False) -> CheckpointFiles:
    """Read the headers of the checkpoint at `path`, and tied embeddings to compare them.

    Args:
        half_applied: take a checkpoint too on which an in-place apply was interrupted (tied copies may differ then).

    Raises:
        refuse: no safetensors there, a damaged file, a shard that lacks a tensor or holds that of another, an unknown
            dtype, tied tensors that differ, an interrupted apply.
        OSError: a file cannot be opened.
    """
    index = _index(path, refuse) if path.is_dir() else {}
    files = _shards(path, index, refuse) if path.is_dir() else [path]
    if not half_applied:
        _refuse_half_changed(path, files, refuse)
    places: dict[str, tuple[StoredTensor, ...]] = {}
    for file in files:
        for tensor in read_header(file, refuse=refuse):
            if tensor.name in places:
                raise refuse(f"{path}: tensor {tensor.name!r} is in {places[tensor.name][0].file.name} and {file.name}")
            places[tensor.name] = (tensor,)
    missing = sorted(set(index) - set(places))
    if missing:
        raise refuse(f"{path}: the index names {missing[0]!r}, which no shard holds")
    if path.is_dir() and {OUTPUT_EMBEDDING, INPUT_EMBEDDING} <= places.keys() and _ties_embeddings(path, refuse):
        copy, kept = places.pop(OUTPUT_EMBEDDING)[0], places[INPUT_EMBEDDING][0]
        alike = (copy.dtype, copy.shape) == (kept.dtype, kept.shape)
        if not alike or not (half_applied or _same_bytes(copy, kept)):
            raise refuse(
                f"{path}: config.json ties the embeddings, but {OUTPUT_EMBEDDING} and {INPUT_EMBEDDING} differ"
            )
        places[INPUT_EMBEDDING] = (kept, copy)
    layout = Layout.build((name, at[0].dtype, at[0].shape) for name, at in places.items())
    return CheckpointFiles(path, path.is_dir(), tuple(files), places, layout)


def read_header(file: Path, *, refuse: type[AnabranchError]) -> list[StoredTensor]:
    """The tensors of one safetensors file, by offset. Raises `refuse` if it is damaged, OSError if it is not there."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            if stream.read(len(MAGIC)) == MAGIC:
                raise ValueError("it is a delta file")
            stream.seek(0)
            _check_size(size, LENGTH.size)
            (header_bytes,) = LENGTH.unpack(stream.read(LENGTH.size))
            if header_bytes > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {header_bytes} bytes")
            _check_size(size, LENGTH.size + header_bytes)
            header = json.loads(stream.read(header_bytes))
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
        header.pop("__metadata__", None)
        start = LENGTH.size + header_bytes
        tensors = [_stored(name, entry, file, start) for name, entry in header.items()]
        tensors.sort(key=lambda t: (t.offset_bytes, t.size_bytes))
        end = start
        for tensor in tensors:
            if tensor.offset_bytes < end:
                raise ValueError(f"tensor {tensor.name!r} lies over another tensor")
            end = tensor.offset_bytes + tensor.size_bytes
        _check_size(size, end)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise refuse(f"{file} is not a readable safetensors file: {_words(error)}") from error
    return tensors


def first_difference(ours: Layout, theirs: Layout, *, here: str, there: str) -> str | None:
    """Where layout `theirs` departs from `ours`, in words that call them `there` and `here`; None if they are equal."""
    for name in sorted(ours.by_name.keys() | theirs.by_name.keys()):
        a, b = ours.by_name.get(name), theirs.by_name.get(name)
        if a is None or b is None:
            return f"tensor {name!r} is " + (f"not in {here}" if a is None else f"missing from {there}")
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"tensor {name!r} is {a.dtype}{list(a.shape)} in {here}, {b.dtype}{list(b.shape)} in {there}"
    return None


def read_object(path: Path, *, refuse: type[AnabranchError]) -> dict[str, Any]:
    """The JSON object in `path`, or {} if there is no such file. Raises `refuse` if it is damaged, OSError if
    it cannot be opened."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise refuse(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise refuse(f"{path} is not a JSON object")
    return value


def single_file_header(layout: Layout) -> bytes:
    """The first bytes of a safetensors file with the tensors of `layout`; `layout.payload_bytes` of data follow them.

    Widest elements first, so that each tensor is aligned to its own elements. `format: pt` is what transformers asks
    for before it loads a file.
    """
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in sorted(layout.tensors, key=lambda t: (-DTYPE_BYTES[t.dtype], t.name)):
        begin, end = end, end + spec.size_bytes
        dtype = SAFETENSORS_NAMES[spec.dtype]
        fields[spec.name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return LENGTH.pack(len(text)) + text


def _check_size(size: int, least: int) -> None:
    if size < least:
        raise ValueError(f"it is cut short: {size} bytes where {least} belong")


def _words(error: Exception) -> str:
    """A ValueError is our own, or JSON's; the others say little without their name."""
    return str(error) if isinstance(error, ValueError) else repr(error)


def _stored(name: str, entry: Any, file: Path, start: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise ValueError(f"tensor {name!r} is not described by a JSON object")
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"tensor {name!r} has dtype {entry['dtype']!r}; known: {', '.join(DTYPES)}")
    if any(type(n) is not int or n < 0 for n in (begin, end, *shape)):
        raise ValueError(f"tensor {name!r} has a size that is no size")
    tensor = StoredTensor(name, DTYPES[entry["dtype"]], shape, file, start + begin)
    if tensor.size_bytes != end - begin:
        raise ValueError(f"tensor {name!r} has {end - begin} bytes, its shape {tensor.size_bytes}")
    return tensor


def _index(folder: Path, refuse: type[AnabranchError]) -> dict[str, str]:
    """Tensor name -> file name; {} if the folder has no index."""
    index = read_object(folder / INDEX_FILE, refuse=refuse).get("weight_map", {})
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise refuse(f"{folder / INDEX_FILE}: its weight_map does not map names to files")
    return index


def _refuse_half_changed(path: Path, files: list[Path], refuse: type[AnabranchError]) -> None:
    """A journal may be of any checkpoint that one of the files, where links lead to it, is a part of: the file alone or
    its folder."""
    suspects = [path]
    for file in files:
        real = Path(os.path.realpath(file))
        suspects.append(real)
        folder = real.parent
        if journal_path(folder).exists() and real in _shards(folder, _index(folder, refuse), refuse):
            suspects.append(folder)
    for suspect in suspects:
        journal = journal_path(suspect)
        if journal.exists():
            raise refuse(
                f"{path} is half changed: an `anabranch delta apply --in-place` of {suspect} was interrupted and left "
                f"{journal.name}; run that command again"
            )


def _shards(folder: Path, index: dict[str, str], refuse: type[AnabranchError]) -> list[Path]:
    names = sorted(set(index.values())) or [SINGLE_FILE]
    files = [folder / Path(name).name for name in names]
    for file in files:
        if not file.is_file():
            raise refuse(f"{folder} is not a safetensors checkpoint: there is no {file.name} in it")
    return files


def _ties_embeddings(folder: Path, refuse: type[AnabranchError]) -> bool:
    config = read_object(folder / "config.json", refuse=refuse)
    inner = config.get("text_config")
    inner = inner if isinstance(inner, dict) else {}
    return bool(config.get("tie_word_embeddings", inner.get("tie_word_embeddings", False)))


def _same_bytes(a: StoredTensor, b: StoredTensor) -> bool:
    with a.file.open("rb") as left, b.file.open("rb") as right:
        left.seek(a.offset_bytes)
        right.seek(b.offset_bytes)
        remaining = a.size_bytes
        while remaining:
            count = min(remaining, _COMPARED_BYTES)
            if left.read(count) != right.read(count):
                return False
            remaining -= count
    return True
