"""Working out the writes of a weight update, beside the steps of the engine that will carry them out.

Invariant: a `Staging` writes nothing into the model. What it hands out was checked whole: the layout, every name, every
index; one refusal and there are no writes at all. What it took from shared memory for a sparse tensor is copied out, and
mappings are kept from update to update, so its cost follows what changed and not the size of the model.
Held by tests/e2e/test_engine_digest.py and tests/unit/producers/test_staging.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.producers.index_map import TORCH_DTYPES, IndexMap
from anabranch.producers.mirror import map_shared, tensor_bits
from anabranch.producers.update_message import WHOLE
from anabranch.schemas.errors import AnabranchError, DeltaError, ModelMismatchError
from anabranch.schemas.layout import TensorSpec

DENSE_SHARE = 32  # copying one element in order costs about 1/32 of scattering one: above that share, copy them all
DEADLINE_S = 600.0  # of the work of one update; it waits for nobody


@dataclass(frozen=True, slots=True)
class Change:
    """What an update says: where the new state lies, and which places of it are new. `rows` are (tensor, first, count):
    `count` int64 flat indices from position `first` of the index array, or count `WHOLE`. `update_id` tells updates apart
    that use the same memory one after the other."""

    mirror_path: str
    layout_hash: str
    rows: tuple[tuple[str, int, int], ...]
    index_path: str
    index_count: int
    update_id: str


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


@dataclass(slots=True)
class Writes:
    """What to carry out, all of it in one go. `reload` are tensors for the model's own loader."""

    in_place: list[_Scatter | _Copy] = field(default_factory=list)
    reload: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    def write(self, load_weights: Callable[[list[tuple[str, torch.Tensor]]], object]) -> None:
        with torch.no_grad():
            for write in self.in_place:
                write.write()
            if self.reload:
                load_weights(self.reload)


class SharedMaps:
    """Mappings of shared memory, kept while the same memory is named: mapping a mirror anew costs a page fault for nearly
    every page that an update touches, more than all the rest."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[int, int, int], NDArray[np.uint8]]] = {}

    def get(self, use: str, path: str, size_bytes: int) -> NDArray[np.uint8]:
        """`size_bytes` at `path` (uint8), the one mapping kept for `use`. Raises DeltaError as `map_shared`."""
        try:
            status = os.stat(path)
        except OSError as error:
            raise DeltaError(f"shared memory {path} cannot be opened: {error.strerror}") from error
        identity = (status.st_dev, status.st_ino, size_bytes)  # a mapped file's number is not given to another
        kept = self._kept.get(use)
        if kept is None or kept[0] != identity:
            kept = self._kept[use] = identity, map_shared(path, size_bytes)
        return kept[1]

    def clear(self) -> None:
        self._kept.clear()


class Staging:
    """One update on its way: `start` works in the background, `result` waits (or works itself, if not started)."""

    def __init__(self, change: Change, index_map: IndexMap, maps: SharedMaps, device: torch.device) -> None:
        self.change = change
        self._index_map, self._maps, self._device = index_map, maps, device
        self._writes = Writes()
        self._error: Exception | None = None
        self._given_up = False
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="weight-staging", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        return self._done.is_set()

    def result(self) -> Writes:
        """The writes.

        Raises:
            ModelMismatchError: another layout, or a tensor the layout lacks.
            DeltaError: the shared memory is gone or too small, or an index is out of range.
        """
        if self._thread is None and not self.ready:
            self._work()
        if not self._done.wait(DEADLINE_S):
            raise AnabranchError(f"a weight update is being staged for more than {DEADLINE_S:g} s")
        if self._error is not None:
            raise self._error
        return self._writes

    def give_up(self) -> None:
        """Stop working, and wait until that is so: the shared memory may be changed afterwards."""
        self._given_up = True
        if self._thread is not None:
            self._thread.join(DEADLINE_S)

    def _work(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            with torch.no_grad():
                self._stage()
            if self._device.type == "cuda":  # the writes run on another stream
                torch.cuda.current_stream(self._device).synchronize()
        except Exception as error:  # noqa: BLE001 - raised by `result`, on the engine's thread
            self._error = error
            self._writes = Writes()
        finally:
            self._done.set()

    def _stage(self) -> None:
        change, layout = self.change, self._index_map.layout
        if change.layout_hash != layout.hash:
            raise ModelMismatchError(
                f"the update is for layout {change.layout_hash}, this engine serves layout {layout.hash}"
            )
        image = self._maps.get("mirror", change.mirror_path, layout.mirror_bytes)
        positions: NDArray[np.int64] = np.empty(0, np.int64)
        if change.index_count:
            positions = self._maps.get("indices", change.index_path, 8 * change.index_count).view(np.int64)
        reload = False
        for name, first, count in change.rows:
            if self._given_up:
                raise AnabranchError("the update was given up")
            spec = layout.by_name.get(name)
            if spec is None:
                raise ModelMismatchError(f"the update changes {name!r}, which the layout lacks")
            if count != WHOLE and not (0 <= first <= first + count <= len(positions)):
                raise DeltaError(f"{name}: indices {first}..{first + count} of {len(positions)}")
            if name in self._index_map.computed:
                reload = True
            elif count == WHOLE:
                self._whole(spec, image)
            else:
                self._sparse(spec, image, positions[first : first + count])
        if reload:  # such tensors may depend on each other inside the loader: all of them or none
            computed = self._index_map.computed
            self._writes.reload = [(name, tensor_in(layout.by_name[name], image)) for name in computed]

    def _whole(self, spec: TensorSpec, image: NDArray[np.uint8]) -> None:
        source = tensor_in(spec, image).view(-1)
        for record, live in self._index_map.runtime_views(spec.name):
            part = source.as_strided(record.shape, record.src_strides, record.src_offset)
            self._writes.in_place.append(_Copy(live, part))

    def _sparse(self, spec: TensorSpec, image: NDArray[np.uint8], indices: NDArray[np.int64]) -> None:
        if len(indices) == 0:
            return
        if int(indices.min()) < 0 or int(indices.max()) >= spec.numel:
            raise DeltaError(f"{spec.name}: an index is outside its {spec.numel} elements")
        if len(indices) * DENSE_SHARE >= spec.numel:
            self._whole(spec, image)
            return
        bits = tensor_bits(image, spec)[indices]
        values = torch.from_numpy(bits).view(TORCH_DTYPES[spec.dtype]).to(self._device)
        where = torch.from_numpy(indices).to(self._device)
        for record in self._index_map.copies[spec.name]:
            mask, offsets = record.locate(where, whole=record.shape == (spec.numel,))
            flat = self._index_map.parameters[record.parameter]
            chosen = (values if mask is None else values[mask]).to(flat.dtype)
            self._writes.in_place.append(_Scatter(flat, offsets, chosen))


def tensor_in(spec: TensorSpec, image: NDArray[np.uint8]) -> torch.Tensor:
    """Tensor `spec` inside a flat image, without a copy."""
    raw = image[spec.offset_bytes : spec.offset_bytes + spec.size_bytes]
    return torch.from_numpy(raw).view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
