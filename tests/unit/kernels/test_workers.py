"""Work in threads: results in order, few items in flight, errors in their turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from anabranch.kernels.workers import Workers


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_order_and_items_are_taken_as_needed(threads: int) -> None:
    taken = []

    def items() -> Iterator[int]:
        for i in range(30):
            taken.append(i)
            yield i

    def work(i: int) -> int:
        time.sleep(0.001 * (i % 3))
        return i * i

    with Workers(threads) as workers:
        for n, result in enumerate(workers.in_order(work, items())):
            assert result == n * n
            assert len(taken) <= n + threads + 1
        assert list(workers.in_order(work, [])) == []


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_is_raised_in_its_turn_and_the_workers_go_on(threads: int) -> None:
    def work(i: int) -> int:
        if i == 2:
            raise KeyError("two")
        return i

    with Workers(threads) as workers:
        results = workers.in_order(work, range(100))
        assert [next(results), next(results)] == [0, 1]
        with pytest.raises(KeyError, match="two"):
            next(results)
        assert list(workers.in_order(work, [0, 1])) == [0, 1]


def test_nothing_is_at_work_when_an_error_has_left() -> None:
    """A job that writes into a mirror must not go on behind its owner's back."""
    started, done = threading.Event(), []

    def work(i: int) -> None:
        if i == 1:
            assert started.wait(10)
            raise KeyError("one")
        started.set()
        time.sleep(0.2)
        done.append(i)

    with Workers(3) as workers:
        with pytest.raises(KeyError):
            list(workers.in_order(work, [1, 0]))
        assert done == [0]


def test_closing_ends_the_threads() -> None:
    before = threading.active_count()
    workers = Workers(3)
    assert list(workers.in_order(str, range(10))) == [str(i) for i in range(10)]
    workers.close()
    assert threading.active_count() == before


def test_no_threads_are_refused() -> None:
    with pytest.raises(ValueError, match="0 threads"):
        Workers(0)
