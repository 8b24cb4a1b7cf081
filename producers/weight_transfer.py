"""The receiving end of weight updates inside a vLLM worker: a `WeightTransferEngine` named "anabranch".

Invariant: an update is written completely or not at all. `stage` (and vLLM's `update_weights`) only prepares: it maps
the mirror, checks the layout, every name and every index, and works out all targets and values;
`finish_weight_update` writes them. A refused update leaves the old weights in place, on every rank. Held by tests/e2e/test_engine_digest.py.

An update says where the new state lies (a mirror in shared memory, `producers/mirror.py`) and what changed in it;
values are absolute, so applying an update twice is harmless. Works in any vLLM process that has called `register()`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

from anabranch.producers import vllm_cpu_shim
from anabranch.producers.checkpoint import checkpoint_tensors
from anabranch.producers.index_map import TORCH_DTYPES, IndexMap, trace
from anabranch.producers.mirror import map_shared, tensor_bits
from anabranch.schemas.errors import AnabranchError, DeltaError, ModelMismatchError
from anabranch.schemas.layout import Layout, TensorSpec

BACKEND = "anabranch"
WHOLE = -1  # count of a tensor that is copied whole
DENSE_SHARE = 32  # copying one element in order costs about 1/32 of scattering one: above that share, copy them all


def register() -> None:
    """Make `WeightTransferConfig(backend="anabranch")` known to vLLM in this process. Idempotent."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, AnabranchWeightTransferEngine)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """`model_dir`: the checkpoint that the engine has loaded; its layout is the only one accepted from then on."""

    model_dir: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The new state and what changed. `changed` rows are [tensor name, first, count]: `count` int64 flat indices from
    position `first` of the index array, or count -1 for the whole tensor."""

    mirror_path: str
    layout_hash: str
    changed: list[tuple[str, int, int]] = field(default_factory=list)
    index_path: str = ""
    index_count: int = 0


@dataclass(frozen=True, slots=True)
class _Scatter:
    """`values` [K] go to `offsets` (int64 [K]) of `flat`."""

    flat: torch.Tensor
    offsets: torch.Tensor
    values: torch.Tensor

    def write(self) -> None:
        self.flat.index_copy_(0, self.offsets, self.values)


@dataclass(frozen=True, slots=True)
class _Copy:
    """`source` goes to the equally shaped live view `target`, converted to its dtype."""

    target: torch.Tensor
    source: torch.Tensor

    def write(self) -> None:
        self.target.copy_(self.source)


class AnabranchWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    _map: IndexMap | None = None
    _staged_info: UpdateInfo | None = None
    _staged: list[_Scatter | _Copy]
    _reload: list[tuple[str, torch.Tensor]]

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Resolve the index map and check every runtime element against the checkpoint on disk.

        Raises:
            ModelMismatchError: names do not fit, elements are not covered, or live values differ from the checkpoint.
        """
        if self.model_config.quantization is not None:
            raise ModelMismatchError(
                f"the engine quantizes ({self.model_config.quantization}); updates need plain weights"
            )
        if current_platform.is_cpu():
            vllm_cpu_shim.check_unpacked(self.model)
        stored = checkpoint_tensors(Path(init_info.model_dir))
        layout = Layout.build((t.name, t.dtype, t.shape) for t in stored)
        self._map = trace(self.model, layout, whole=self.parallel_config.tensor_parallel_size == 1)
        self.cancel()
        for tensor in stored:
            if tensor.name not in self._map.computed:
                self._self_check(layout.by_name[tensor.name], tensor.read())

    def start_weight_update(self) -> None:
        """Nothing to prepare: writes happen in place, at the end."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Stage an update, unless that very one was staged before. Errors as `stage`."""
        if update_info != self._staged_info:
            self._stage(update_info)

    def stage(self, update_info: dict[str, Any]) -> None:
        """Check an update and work out its writes, writing nothing. `update_info` has the fields of `UpdateInfo`.

        Raises:
            ModelMismatchError: another layout, or a tensor the layout lacks.
            DeltaError: the shared memory is gone or too small, or an index is out of range.
        """
        self._stage(self.parse_update_info(update_info))

    def _stage(self, update_info: UpdateInfo) -> None:
        self.cancel()
        layout = self._index_map.layout
        if update_info.layout_hash != layout.hash:
            raise ModelMismatchError(
                f"the update is for layout {update_info.layout_hash}, this engine serves layout {layout.hash}"
            )
        image = map_shared(update_info.mirror_path, layout.mirror_bytes)
        positions: NDArray[np.int64] = np.empty(0, np.int64)
        if update_info.index_count:
            positions = map_shared(update_info.index_path, 8 * update_info.index_count).view(np.int64)
        reload = False
        for name, first, count in update_info.changed:
            spec = layout.by_name.get(name)
            if spec is None:
                raise ModelMismatchError(f"the update changes {name!r}, which the layout lacks")
            if count != WHOLE and not (0 <= first <= first + count <= len(positions)):
                raise DeltaError(f"{name}: indices {first}..{first + count} of {len(positions)}")
            if name in self._index_map.computed:
                reload = True
            elif count == WHOLE:
                self._stage_whole(spec, image)
            else:
                self._stage_sparse(spec, image, positions[first : first + count])
        if reload:  # such tensors may depend on each other inside the loader: all of them or none
            self._reload = [(n, _tensor(layout.by_name[n], image)) for n in self._index_map.computed]
        self._staged_info = update_info

    def finish_weight_update(self) -> None:
        """Write what was staged."""
        with torch.no_grad():
            for write in self._staged:
                write.write()
            if self._reload:
                self.model.load_weights(self._reload)  # type: ignore[operator]
        self.cancel()

    def cancel(self) -> None:
        """Forget what was staged."""
        self._staged, self._reload, self._staged_info = [], [], None

    def export_live(self, path: str, layout_hash: str) -> None:
        """Write this rank's live weights into the flat image at `path`, in checkpoint order and dtype.

        Raises:
            ModelMismatchError: another layout, a tensor that the loader computes, or live values that the checkpoint's
                dtype cannot hold (so they are not what any checkpoint says).
        """
        index_map = self._index_map
        if layout_hash != index_map.layout.hash:
            raise ModelMismatchError(f"the image has layout {layout_hash}, this engine {index_map.layout.hash}")
        if index_map.computed:
            raise ModelMismatchError(f"the loader computes {index_map.computed[0]!r}: it has no way back")
        image = map_shared(path, index_map.layout.mirror_bytes, writable=True)
        for spec in index_map.layout.tensors:
            target = _tensor(spec, image).view(-1)
            for record, live in index_map.runtime_views(spec.name):
                stored = live.cpu()
                exact = stored.to(target.dtype)
                if not _same_bits(exact.to(stored.dtype), stored):
                    raise ModelMismatchError(f"live values of {spec.name!r} are not exact in {spec.dtype}")
                target.as_strided(record.shape, record.src_strides, record.src_offset).copy_(exact)

    def shutdown(self) -> None:
        self.cancel()

    @property
    def _index_map(self) -> IndexMap:
        if self._map is None:
            raise AnabranchError("init_weight_transfer_engine has not been called")
        return self._map

    def _self_check(self, spec: TensorSpec, data: NDArray[np.uint8]) -> None:
        stored = torch.from_numpy(data).view(TORCH_DTYPES[spec.dtype])
        for record, live in self._index_map.runtime_views(spec.name):
            expected = stored.as_strided(record.shape, record.src_strides, record.src_offset).to(live.dtype)
            if not _same_bits(expected, live.cpu()):
                raise ModelMismatchError(
                    f"the engine's {record.parameter!r} does not hold the values of {spec.name!r}: the backend "
                    "transforms weights after loading, in-place updates would be wrong"
                )

    def _stage_whole(self, spec: TensorSpec, image: NDArray[np.uint8]) -> None:
        source = _tensor(spec, image).view(-1)
        for record, live in self._index_map.runtime_views(spec.name):
            self._staged.append(_Copy(live, source.as_strided(record.shape, record.src_strides, record.src_offset)))

    def _stage_sparse(self, spec: TensorSpec, image: NDArray[np.uint8], indices: NDArray[np.int64]) -> None:
        if len(indices) == 0:
            return
        if int(indices.min()) < 0 or int(indices.max()) >= spec.numel:
            raise DeltaError(f"{spec.name}: an index is outside its {spec.numel} elements")
        if len(indices) * DENSE_SHARE >= spec.numel:
            self._stage_whole(spec, image)
            return
        bits = tensor_bits(image, spec)[indices]
        values = torch.from_numpy(bits).view(TORCH_DTYPES[spec.dtype]).to(self.device)
        where = torch.from_numpy(indices).to(self.device)
        for record in self._index_map.copies[spec.name]:
            mask, offsets = record.locate(where, whole=record.shape == (spec.numel,))
            flat = self._index_map.parameters[record.parameter]
            self._staged.append(_Scatter(flat, offsets, (values if mask is None else values[mask]).to(flat.dtype)))


def _tensor(spec: TensorSpec, image: NDArray[np.uint8]) -> torch.Tensor:
    """Tensor `spec` inside a flat image, without a copy."""
    raw = image[spec.offset_bytes : spec.offset_bytes + spec.size_bytes]
    return torch.from_numpy(raw).view(TORCH_DTYPES[spec.dtype]).view(spec.shape)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(width), b.contiguous().view(width))
