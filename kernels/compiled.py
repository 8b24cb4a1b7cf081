"""Numba's compiler as this project uses it: no GIL, and kept on disk where the disk allows.

Invariant: a compiled function runs without the GIL, so threads over chunks scale; where numba finds no folder that it
may write to (a read-only install under a service user without a home), the function is compiled anew in each process
instead of failing at import. What is kept is used only while every file of this folder is as it was: numba itself looks at
the file of a function alone, not at what it inlines from others. Held by tests/unit/kernels/test_compiled.py.

Loading numba must not disturb who else lives in the process. llvmlite 0.47's library handle answers to any attribute
whatever, `__dict__` included; vLLM 0.32 looks through the attributes of all loaded modules for one, takes the answer for
it and dies. So the handle is made to own up to what it lacks. Remove that when either of the two is mended.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite.binding import ffi

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F, *, contract: bool = False) -> F:
    """`function`, compiled at its first call for the dtypes it is called with. `contract`: a·b + c may be rounded once."""
    options = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"} if contract else False}
    try:
        kept = numba.njit(cache=True, **options)(function)
        # No public way leads there; a numba that has moved it raises here, and the tests say so.
        kept._cache._cache_file._source_stamp = _stamp()
        return cast(F, kept)
    except (RuntimeError, AttributeError):  # RuntimeError: "cannot cache function: no locator available"
        return cast(F, numba.njit(**options)(function))


@cache
def _stamp() -> tuple[tuple[str, int, int], ...]:
    """Name, time of change (ns) and size of every file of this folder."""
    files = sorted(Path(__file__).resolve().parent.glob("*.py"))
    return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)


def _answer_to_symbols_alone(library: Any) -> None:
    if not hasattr(library, "__dict__"):
        return
    wrapper = type(library)
    look_up = wrapper.__getattr__

    def only_symbols(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return look_up(self, name)

    wrapper.__getattr__ = only_symbols


_answer_to_symbols_alone(ffi.lib)
