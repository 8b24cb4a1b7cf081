"""Threads for work that releases the GIL, kept for as long as their owner likes: starting one costs as much as a delta.

Invariant: `in_order` yields results in the order of the items whatever the number of threads, and never has more than
`threads` + 1 items under way or waiting, so memory is bounded by items in flight, not by items; when it raises, or its
consumer stops, nothing of it is at work any more. Held by tests/unit/kernels/test_workers.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


class Workers:
    """`threads` threads, the caller's among them. A context manager, or `close` it."""

    def __init__(self, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"{threads} threads")
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="delta") if threads > 1 else None

    def in_order(self, function: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
        """`function` of each item, in order. An error of an item is raised in its turn; later ones are given up.

        The caller is one of the threads: while the others are busy it takes an item itself, so that two jobs on two
        threads wake up one.
        """
        if self._pool is None:
            yield from map(function, items)
            return
        waiting: deque[Future[B]] = deque()
        try:
            for item in items:
                if sum(not future.done() for future in waiting) < self.threads - 1:
                    waiting.append(self._pool.submit(function, item))
                else:
                    waiting.append(_done(function, item))
                while waiting and (waiting[0].done() or len(waiting) > self.threads):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
            wait(waiting)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _done(function: Callable[[A], B], item: A) -> Future[B]:
    """A future whose work is done here and now."""
    future: Future[B] = Future()
    try:
        future.set_result(function(item))
    except Exception as error:  # noqa: BLE001 - raised by result(), in its turn
        future.set_exception(error)
    return future
