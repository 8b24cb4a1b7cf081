"""Digests of tensor bytes: xxh3-128, the unit from which `schemas.layout.root_digest` builds a model's digest.

Invariant: equal bytes give equal digests on every machine; dtype and shape are bound by the layout, not here. Held by
tests/unit/kernels/test_digest.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray


def tensor_digest(data: NDArray[Any] | bytes | memoryview) -> str:
    """xxh3-128 (32 hex digits) of the bytes of `data` in memory order (little-endian, C-contiguous).

    Raises:
        ValueError: a NumPy array that is not C-contiguous (its memory order would not be its element order).
    """
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise ValueError("a digest needs a C-contiguous array")
        data = data.reshape(-1).view(np.uint8).data
    return str(xxhash.xxh3_128_hexdigest(data))
