"""Two packages from PyPI to compare with: fireworks-delta-compression (deltas) and zipnn (snapshots).

Invariant: each is called through its public API alone, is imported only when it is measured, and gives back the exact
bits or the benchmark fails. Held by tests/unit/deploy/test_codec_peers.py.

What each gets in its favour: arrays are handed over without a copy; arc_v3's decoded tensors and zipnn's decoded bytes
count as the new state as they are, without being copied into place; zipnn's files carry no names.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from anabranch.deploy.codec_pair import State
from anabranch.kernels.delta_dtypes import Bits
from anabranch.kernels.workers import Workers
from anabranch.schemas.errors import UsageError
from anabranch.schemas.layout import DTYPE_BYTES, Layout

ARC_PACKAGE, ZIPNN_PACKAGE = "fireworks-delta-compression", "zipnn"
_MODULES = {ARC_PACKAGE: "fireworks_delta_compression", ZIPNN_PACKAGE: "zipnn"}
_INSTALL = {
    ARC_PACKAGE: "fireworks-delta-compression==0.1.0 zstd==1.5.7.2",
    ZIPNN_PACKAGE: "--no-build-isolation zipnn==0.5.4  (needs a C compiler and Python's headers)",
}
_TORCH = {
    "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "f8_e4m3": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2", "i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8", "u8": "uint8", "bool": "bool",
}  # fmt: skip
_ZIPNN = ("bf16", "f16", "f32", "f8_e4m3", "f8_e5m2")  # it refuses the others


def require(package: str) -> None:
    """Raises UsageError, with how to install it, if `package` is not there."""
    if importlib.util.find_spec(_MODULES[package]) is None:
        raise UsageError(f"{package} is not installed: .venv/bin/python -m pip install --no-deps {_INSTALL[package]}")


class ArcV3:
    """Format arc_v3 of fireworks-delta-compression: each tensor by itself, the smallest of several encodings.

    Which of them are finished when it stops waiting depends on their speed, so two runs may differ in size. It starts
    threads of its own for every tensor, also when it is called from one: `threads=1` means one core here.
    """

    name = "arc_v3"

    def __init__(self, layout: Layout) -> None:
        require(ARC_PACKAGE)
        self._layout = layout

    def prepare(self, base: State, new: State) -> tuple[Any, Any]:
        return self._tensors(base), self._tensors(new)

    def encode(self, base: Any, new: Any, workers: Workers) -> tuple[dict[str, Any], dict[str, str]]:
        from fireworks_delta_compression import delta_compress_dicts

        with _torch_threads(workers.threads), _pool(workers.threads) as pool:
            return delta_compress_dicts(base, new, self.name, executor=pool)

    def size_bytes(self, encoded: tuple[dict[str, Any], dict[str, str]]) -> int:
        """Of the safetensors file as its `delta_compress_dicts_to_file` writes it."""
        from safetensors.torch import save

        tensors, checksums = encoded
        return len(save(tensors, metadata=checksums))

    def decode(self, state: dict[str, Bits], encoded: tuple[dict[str, Any], dict[str, str]], workers: Workers) -> State:
        from fireworks_delta_compression import delta_decompress

        tensors, checksums = encoded
        base = self._tensors(state)

        def one(name: str) -> Any:
            return delta_decompress(
                src=base[name], compressed_diff=tensors[name], checksum=checksums[name], compression_format=self.name
            )

        with _torch_threads(workers.threads), _pool(workers.threads) as pool, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it makes tensors over bytes, which cannot be written to
            decoded = list((pool.map if pool else map)(one, tensors))
        uint = {name: bits.dtype for name, bits in state.items()}
        return {name: _bits(tensor, uint[name]) for name, tensor in zip(tensors, decoded, strict=True)}

    def _tensors(self, state: State) -> dict[str, Any]:
        """Tensors over the same memory, in their own dtypes and shapes."""
        import torch

        return {
            spec.name: torch.from_numpy(state[spec.name].view(np.uint8))
            .view(getattr(torch, _TORCH[spec.dtype]))
            .reshape(spec.shape)
            for spec in self._layout.tensors
        }


class ZipNN:
    """Full snapshots by zipnn: the bytes of all tensors of one dtype as one buffer; what it has no mode for stays raw."""

    name = "zipnn"

    def __init__(self, layout: Layout) -> None:
        require(ZIPNN_PACKAGE)
        self._groups: dict[str, list[str]] = {}
        for spec in layout.tensors:
            self._groups.setdefault(spec.dtype, []).append(spec.name)

    def prepare(self, base: State, new: State) -> tuple[State, dict[str, bytearray]]:
        """Buffers of its own: zipnn reorders the bits of its input in place."""
        raw = {dtype: bytearray().join(new[n].data for n in names) for dtype, names in self._groups.items()}
        return base, raw

    def encode(self, base: State, new: Any, workers: Workers) -> dict[str, bytes]:
        zipnn = _zipnn()
        return {
            dtype: zipnn.ZipNN(bytearray_dtype=_TORCH[dtype], threads=workers.threads).compress(raw)
            if dtype in _ZIPNN
            else bytes(raw)
            for dtype, raw in new.items()
        }

    def size_bytes(self, encoded: dict[str, bytes]) -> int:
        return sum(map(len, encoded.values()))

    def decode(self, state: dict[str, Bits], encoded: dict[str, bytes], workers: Workers) -> State:
        zipnn = _zipnn()
        out: dict[str, Bits] = {}
        for dtype, blob in encoded.items():
            names = self._groups[dtype]
            if dtype in _ZIPNN:
                blob = zipnn.ZipNN(bytearray_dtype=_TORCH[dtype], threads=workers.threads).decompress(blob)
            flat = np.frombuffer(blob, state[names[0]].dtype) if len(blob) else state[names[0]][:0]
            assert flat.nbytes == sum(state[n].size for n in names) * DTYPE_BYTES[dtype]
            out |= zip(names, np.split(flat, np.cumsum([state[n].size for n in names])[:-1]), strict=True)
        return out


def _zipnn() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it compiles a function with torch.jit at its import
        return importlib.import_module("zipnn")


def _bits(tensor: Any, uint: Any) -> Bits:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().view(uint)


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    """Torch's own threads follow the thread count that is measured; a process-wide setting, so it is put back."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _pool(threads: int) -> Iterator[ThreadPoolExecutor | None]:
    if threads == 1:
        yield None
    else:
        with ThreadPoolExecutor(threads) as pool:
            yield pool
