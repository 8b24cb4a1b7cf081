"""What an engine is told of a weight update: which shared memory holds it, and which places of it are new.

Invariant: the message names memory that holds still until the update is written or given up: the mirror is its owner's to
keep so, the indices lie in memory of this object that is reused by the next `message` only.
Held by tests/unit/producers/test_staging.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from anabranch.producers.mirror import SharedMemory
from anabranch.schemas.layout import Layout

Changed = Mapping[str, NDArray[np.int64] | None]  # tensor -> flat indices [K], or None for all of it
WHOLE = -1  # count of a tensor that is copied whole
STAGING = ["staging"]  # a worker's answer that is no refusal: ask again


class Image(Protocol):
    """A mirror, as far as an update needs it."""

    @property
    def layout(self) -> Layout: ...
    @property
    def path(self) -> str: ...


class UpdateMemory:
    """The memory of one sender's updates, one after the other. It grows to the largest and is then reused."""

    def __init__(self) -> None:
        self._memory = SharedMemory("anabranch-indices", 0)

    def message(self, mirror: Image, changed: Changed) -> dict[str, Any]:
        """`update_info` for vLLM's `update_weights` (fields of weight_transfer.UpdateInfo; JSON will carry it)."""
        count = sum(len(i) for i in changed.values() if i is not None)
        if 8 * count > self._memory.data.nbytes:
            self._memory.close()
            self._memory = SharedMemory("anabranch-indices", 8 * (count + count // 4))
        flat, first, rows = self._memory.data.view(np.int64), 0, []
        for name, indices in changed.items():
            if indices is None:
                rows.append([name, 0, WHOLE])
                continue
            flat[first : first + len(indices)] = indices
            rows.append([name, first, len(indices)])
            first += len(indices)
        return {
            "mirror_path": mirror.path,
            "layout_hash": mirror.layout.hash,
            "changed": rows,
            "index_path": self._memory.path,
            "index_count": count,
            "update_id": secrets.token_hex(8),
        }

    def close(self) -> None:
        self._memory.close()
