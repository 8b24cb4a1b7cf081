"""Numba's compiler as this project uses it: no GIL, and kept on disk where the disk allows.

Invariant: a compiled function runs without the GIL, so threads over chunks scale; where numba finds no folder that it
may write to (a read-only install under a service user without a home), the function is compiled anew in each process
instead of failing at import. Held by tests/unit/kernels/test_compiled.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """`function`, compiled at its first call for the dtypes it is called with."""
    try:
        return cast(F, numba.njit(nogil=True, error_model="numpy", cache=True)(function))
    except RuntimeError:  # "cannot cache function: no locator available"
        return cast(F, numba.njit(nogil=True, error_model="numpy")(function))
