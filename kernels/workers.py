"""Threads for work that releases the GIL, kept for as long as their owner likes: starting one costs as much as a delta.

Invariant: `in_order` yields results in the order of the items whatever the number of threads, and never has more than
`threads` + 1 items under way or waiting, so memory is bounded by items in flight, not by items. Held by
tests/unit/kernels/test_workers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


class Workers:
    """`threads` threads; with 1 all is done on the caller's. A context manager, or `close` it."""

    def __init__(self, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"{threads} threads")
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="delta") if threads > 1 else None

    def in_order(self, function: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
        """`function` of each item, in order. An error of an item is raised in its turn; later ones are given up."""
        if self._pool is None:
            yield from map(function, items)
            return
        waiting: list[Future[B]] = []
        try:
            for item in items:
                waiting.append(self._pool.submit(function, item))
                if len(waiting) > self.threads:
                    yield waiting.pop(0).result()
            while waiting:
                yield waiting.pop(0).result()
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
