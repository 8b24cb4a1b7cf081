"""The receiving end of weight updates inside a vLLM worker: a `WeightTransferEngine` named "anabranch".

Invariant: an update is written completely or not at all. `stage` (and vLLM's `update_weights`) only prepares, beside the
steps if asked to (`producers/staging.py`); `finish_weight_update` writes. A refused update leaves the old weights in
place, on every rank. Held by tests/e2e/test_engine_digest.py and tests/e2e/test_vllm_serve.py.

An update says where the new state lies (a mirror in shared memory, `producers/mirror.py`) and what changed in it;
values are absolute, so applying an update twice is harmless. Works in any vLLM process in which the backend is registered
(`producers/vllm_plugin.py`, `producers/worker_extension.py`).
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
from vllm.platforms import current_platform

from anabranch.producers import vllm_cpu_shim, worker_extension
from anabranch.producers.checkpoint import checkpoint_tensors
from anabranch.producers.index_map import TORCH_DTYPES, IndexMap, trace
from anabranch.producers.mirror import map_shared
from anabranch.producers.staging import Change, SharedMaps, Staging, tensor_in
from anabranch.producers.vllm_setup import EXTENSION
from anabranch.schemas.errors import AnabranchError, DeltaError, ModelMismatchError
from anabranch.schemas.layout import Layout, TensorSpec


@dataclass
class InitInfo(WeightTransferInitInfo):
    """`model_dir`: the checkpoint that the engine has loaded; its layout is the only one accepted from then on."""

    model_dir: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The new state and what changed, as `staging.Change` says; from another process it comes as JSON or msgpack."""

    mirror_path: str
    layout_hash: str
    changed: list[tuple[str, int, int]] = field(default_factory=list)
    index_path: str = ""
    index_count: int = 0
    update_id: str = ""

    def change(self) -> Change:
        """Raises DeltaError if a field is of another type than it says."""
        texts = (self.mirror_path, self.layout_hash, self.index_path, self.update_id)
        rows = [tuple(row) for row in self.changed if isinstance(row, list | tuple)]
        good = all(len(r) == 3 and isinstance(r[0], str) and type(r[1]) is type(r[2]) is int for r in rows)
        if not all(isinstance(t, str) for t in texts) or type(self.index_count) is not int or self.index_count < 0:
            raise DeltaError("a weight update names its shared memory by texts and a count")
        if not good or len(rows) != len(self.changed):
            raise DeltaError("a weight update lists its changes as [tensor name, first, count]")
        return Change(
            self.mirror_path, self.layout_hash, tuple(rows), self.index_path, self.index_count, self.update_id
        )  # type: ignore[arg-type]


class AnabranchWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._map: IndexMap | None = None
        self.model_dir: str | None = None  # the checkpoint whose index map is resolved
        self._maps = SharedMaps()
        self._staging: Staging | None = None
        if self.parallel_config.worker_extension_cls != EXTENSION:
            worker_extension.attach()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Resolve the index map and check every runtime element against the checkpoint on disk.

        Raises:
            ModelMismatchError: names do not fit, elements are not covered, or live values differ from the checkpoint.
        """
        self.cancel()
        if self.model_config.quantization is not None:
            raise ModelMismatchError(
                f"the engine quantizes ({self.model_config.quantization}); updates need plain weights"
            )
        if current_platform.is_cpu():
            vllm_cpu_shim.check_unpacked(self.model)
        stored = checkpoint_tensors(Path(init_info.model_dir))
        layout = Layout.build((t.name, t.dtype, t.shape) for t in stored)
        index_map = trace(self.model, layout, whole=self.parallel_config.tensor_parallel_size == 1)
        for tensor in stored:
            if tensor.name not in index_map.computed:
                _self_check(index_map, layout.by_name[tensor.name], tensor.read())
        self._map, self.model_dir = index_map, init_info.model_dir

    def start_weight_update(self) -> None:
        """Nothing to prepare: writes happen in place, at the end."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Stage an update, unless that very one was staged before. Errors as `stage`."""
        change = update_info.change()
        if self._staging is None or self._staging.change != change:
            self._begin(change)
        self._staged().result()

    def stage(self, update_info: dict[str, Any], *, background: bool) -> None:
        """Check an update and work out its writes, writing nothing. `update_info` has the fields of `UpdateInfo`.

        Args:
            background: come back at once; ask with `staged`.

        Raises:
            ModelMismatchError: another layout, or a tensor the layout lacks.
            DeltaError: the shared memory is gone or too small, or an index is out of range.
        """
        try:
            change = self.parse_update_info(update_info).change()
        except ValueError as error:
            raise DeltaError(str(error)) from error
        self._begin(change)
        if background:
            self._staged().start()
        else:
            self._staged().result()

    def staged(self, *, wait: bool) -> bool:
        """Whether the update is staged. Raises what `stage` found wrong, AnabranchError if nothing is on its way."""
        staging = self._staged()
        if not wait and not staging.ready:
            return False
        staging.result()
        return True

    def finish_weight_update(self) -> None:
        """Write what was staged."""
        if self._staging is None:
            return
        self._staging.result().write(self.model.load_weights)  # type: ignore[arg-type]
        if self.device.type == "cuda":  # what was staged on another stream must outlive the writes
            torch.cuda.current_stream(self.device).synchronize()
        self._staging = None

    def cancel(self) -> None:
        """Forget what was staged or is being staged."""
        if self._staging is not None:
            self._staging.give_up()
        self._staging = None

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
            target = tensor_in(spec, image).view(-1)
            for record, live in index_map.runtime_views(spec.name):
                stored = live.cpu()
                exact = stored.to(target.dtype)
                if not _same_bits(exact.to(stored.dtype), stored):
                    raise ModelMismatchError(f"live values of {spec.name!r} are not exact in {spec.dtype}")
                target.as_strided(record.shape, record.src_strides, record.src_offset).copy_(exact)

    def shutdown(self) -> None:
        self.cancel()
        self._maps.clear()

    @property
    def _index_map(self) -> IndexMap:
        if self._map is None:
            raise AnabranchError("init_weight_transfer_engine has not been called")
        return self._map

    def _begin(self, change: Change) -> None:
        self.cancel()
        self._staging = Staging(change, self._index_map, self._maps, self.device)

    def _staged(self) -> Staging:
        if self._staging is None:
            raise AnabranchError("no weight update is being staged")
        return self._staging


def _self_check(index_map: IndexMap, spec: TensorSpec, data: NDArray[np.uint8]) -> None:
    stored = torch.from_numpy(data).view(TORCH_DTYPES[spec.dtype])
    for record, live in index_map.runtime_views(spec.name):
        expected = stored.as_strided(record.shape, record.src_strides, record.src_offset).to(live.dtype)
        if not _same_bits(expected, live.cpu()):
            raise ModelMismatchError(
                f"the engine's {record.parameter!r} does not hold the values of {spec.name!r}: the backend "
                "transforms weights after loading, in-place updates would be wrong"
            )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(width), b.contiguous().view(width))
