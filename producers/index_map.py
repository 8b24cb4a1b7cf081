"""Where each element of a checkpoint lives in a running engine: checkpoint index -> runtime index.

Invariant: after `trace`, every checkpoint tensor is either a list of affine copies into runtime parameters or named
in `computed` (reloaded densely through the model's own loader), and every runtime element that is not padding is
covered exactly once; anything else is refused. Held by tests/unit/producers/test_index_map.py and, on real engines,
tests/e2e/test_engine_digest.py.

How: the model's own `load_weights` knows how names, fused projections, tensor-parallel slices and padding map. It is
fed *meta* tensors (shape and strides, no data) under a dispatch mode that notes every `copy_(parameter view,
checkpoint view)` as offsets and strides instead of carrying it out. No weight is touched, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anabranch.schemas.errors import ModelMismatchError
from anabranch.schemas.layout import Layout, TensorSpec

TORCH_DTYPES = {
    "bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64,
    "f8_e4m3": torch.float8_e4m3fn, "f8_e5m2": torch.float8_e5m2,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip

_COPY, _FILL, _ZERO = torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default


@dataclass(frozen=True, slots=True)
class CopyRecord:
    """A box of a checkpoint tensor and its place in a runtime parameter. Offsets and strides count elements;
    `src_*` within the contiguous checkpoint tensor, `dst_*` within the storage of runtime parameter `parameter`.
    Dimensions that are contiguous on both sides are merged, so a plain copy has one dimension of stride 1."""

    parameter: str
    shape: tuple[int, ...]
    src_offset: int
    src_strides: tuple[int, ...]
    dst_offset: int
    dst_strides: tuple[int, ...]

    def locate(self, indices: torch.Tensor, *, whole: bool = False) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Which of `indices` (int64 [K], flat in the checkpoint tensor) lie in this box, and where they go.

        Args:
            whole: the box is the whole tensor, so all of them do.

        Returns:
            mask, bool [K], or None if all do; offsets into the runtime storage for the selected ones, int64 [mask.sum()].
        """
        if whole and self.src_strides == (1,) and self.dst_strides == (1,):
            return None, indices + (self.dst_offset - self.src_offset)
        rest = indices - self.src_offset
        inside = rest >= 0
        target = torch.full_like(rest, self.dst_offset)
        # Boxes of a contiguous tensor nest: taking the largest stride first leaves a remainder inside the next one.
        for i in sorted(range(len(self.shape)), key=lambda i: -self.src_strides[i]):
            step = torch.div(rest, self.src_strides[i], rounding_mode="floor")
            inside &= step < self.shape[i]
            target += step * self.dst_strides[i]
            rest = rest - step * self.src_strides[i]
        inside &= rest == 0
        return inside, target[inside]


@dataclass(frozen=True)
class IndexMap:
    """`copies`: checkpoint name -> records. `computed`: names whose loader does more than copy. `parameters`: runtime
    name -> flat tensor over the parameter's whole storage (the live weights). `padding`: runtime name -> element
    count that the loader fills with a constant."""

    layout: Layout
    copies: dict[str, tuple[CopyRecord, ...]]
    computed: tuple[str, ...]
    parameters: dict[str, torch.Tensor]
    padding: dict[str, int] = field(default_factory=dict)

    def runtime_views(self, name: str) -> Iterator[tuple[CopyRecord, torch.Tensor]]:
        """Each record of tensor `name` with the live view it writes (shape of the record)."""
        for record in self.copies[name]:
            flat = self.parameters[record.parameter]
            yield record, flat.as_strided(record.shape, record.dst_strides, record.dst_offset)


def trace(model: torch.nn.Module, layout: Layout, *, whole: bool = True) -> IndexMap:
    """Resolve `layout` against a loaded `model` that has vLLM's `load_weights(iterable of (name, tensor))`.

    Args:
        whole: also require that every checkpoint element is copied; False on one rank of a tensor-parallel group,
            which holds a part.

    Raises:
        ModelMismatchError: a checkpoint name that the model's loader ignores or does not know, an empty runtime
            parameter (packed by the backend), or a runtime element that no checkpoint tensor covers.
    """
    parameters, owners = _flat_parameters(model)
    copies: dict[str, tuple[CopyRecord, ...]] = {}
    computed: list[str] = []
    fills: list[CopyRecord] = []
    for spec in layout.tensors:
        recorder = _record(model, spec, owners)
        if recorder.computes:
            computed.append(spec.name)
            continue
        if not recorder.copies and whole:
            raise ModelMismatchError(f"the model's loader ignores checkpoint tensor {spec.name!r}")
        copied = sum(_numel(r) for r in recorder.copies)
        if whole and copied != spec.numel:
            raise ModelMismatchError(f"the loader takes {copied} of the {spec.numel} elements of {spec.name!r}")
        copies[spec.name] = tuple(recorder.copies)
        fills += recorder.fills
    index_map = IndexMap(layout, copies, tuple(computed), parameters, _padding(fills))
    if not computed:
        _check_coverage(model, index_map, owners, fills)
    return index_map


class _Computes(Exception):
    """The loader did something else than copy."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes copies from `source` (a meta tensor) into parameters; carries none of them out."""

    def __init__(self, source: torch.Tensor, owners: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[CopyRecord] = []
        self.fills: list[CopyRecord] = []
        self.computes = False
        self._source = _storage_id(source)
        self._owners = owners

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            parameter = self._owners.get(_storage_id(args[0]))
            if parameter is not None:
                return self._write(func, parameter, *args)
        return func(*args, **(kwargs or {}))

    def _write(self, func: Any, parameter: str, target: torch.Tensor, *rest: Any) -> torch.Tensor:
        if func in (_FILL, _ZERO):
            self.fills.append(_record_of(parameter, target, target))
            return target
        source = rest[0] if func is _COPY else None
        if source is None or _storage_id(source) != self._source or source.shape != target.shape:
            raise _Computes
        self.copies.append(_record_of(parameter, source, target))
        return target


def _record(model: torch.nn.Module, spec: TensorSpec, owners: dict[int, str]) -> _Recorder:
    meta = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
    recorder = _Recorder(meta, owners)
    try:
        with torch.no_grad(), recorder:
            model.load_weights([(spec.name, meta)])  # type: ignore[operator]
    except (_Computes, NotImplementedError):  # torch: "cannot copy out of meta tensor", a value-dependent branch
        recorder.computes = True
    except (KeyError, ValueError, AssertionError, AttributeError, RuntimeError) as error:
        if _needs_data(error):
            recorder.computes = True
        else:
            raise ModelMismatchError(
                f"the model has no place for checkpoint tensor {spec.name!r} of shape {list(spec.shape)}: {error}"
            ) from error
    return recorder


def _needs_data(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and "meta tensor" in str(error).lower()


def _storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _flat_parameters(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[int, str]]:
    """Runtime name -> flat tensor over the storage; storage id -> that name (the first parameter on it)."""
    flat: dict[str, torch.Tensor] = {}
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0 or parameter.is_meta:
            raise ModelMismatchError(
                f"runtime parameter {name!r} is empty: the backend packed its weights away, so they cannot be updated"
            )
        if _storage_id(parameter) not in owners:
            owners[_storage_id(parameter)] = name
            size = parameter.untyped_storage().nbytes() // parameter.element_size()
            flat[name] = parameter.detach().as_strided((size,), (1,), 0)
    return flat, owners


def _record_of(parameter: str, source: torch.Tensor, target: torch.Tensor) -> CopyRecord:
    merged: list[tuple[int, int, int]] = []  # (size, source stride, target stride), outermost first
    for size, src, dst in zip(target.shape, source.stride(), target.stride(), strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1:] == (src * size, dst * size):
            merged[-1] = (merged[-1][0] * size, src, dst)
        else:
            merged.append((size, src, dst))
    shape, src_strides, dst_strides = zip(*merged or [(target.numel(), 1, 1)], strict=True)
    offsets = int(source.storage_offset()), int(target.storage_offset())
    return CopyRecord(parameter, shape, offsets[0], src_strides, offsets[1], dst_strides)


def _numel(record: CopyRecord) -> int:
    return int(torch.Size(record.shape).numel())


def _padding(fills: Iterable[CopyRecord]) -> dict[str, int]:
    padding: dict[str, int] = {}
    for fill in set(fills):  # a fused parameter may be filled once per part
        padding[fill.parameter] = padding.get(fill.parameter, 0) + _numel(fill)
    return padding


def _check_coverage(
    model: torch.nn.Module, index_map: IndexMap, owners: dict[int, str], fills: Iterable[CopyRecord]
) -> None:
    """Every parameter element is written by exactly one checkpoint element, or is padding."""
    writers: dict[str, list[tuple[str | None, CopyRecord]]] = {}
    for fill in fills:  # padding first, data may overwrite it
        writers.setdefault(fill.parameter, []).append((None, fill))
    for name, records in index_map.copies.items():
        for record in records:
            writers.setdefault(record.parameter, []).append((name, record))
    for runtime_name, parameter in model.named_parameters():
        owner = owners[_storage_id(parameter)]
        covered = torch.zeros(index_map.parameters[owner].shape, dtype=torch.uint8)
        for writer, record in writers.get(owner, []):
            box = covered.as_strided(record.shape, record.dst_strides, record.dst_offset)
            if writer is not None and bool((box == 2).any()):
                raise ModelMismatchError(f"two checkpoint tensors write {owner!r}; one of them is {writer!r}")
            box.fill_(1 if writer is None else 2)
        mine = covered.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset())
        if not bool((mine > 0).all()):
            missing = int((mine == 0).sum())
            raise ModelMismatchError(
                f"{missing} of the {parameter.numel()} elements of runtime parameter {runtime_name!r} "
                "come from no checkpoint tensor"
            )
