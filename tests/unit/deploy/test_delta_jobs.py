"""A pass over a model: the same for any number of threads, and never with more in memory than a few jobs."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from anabranch.deploy.delta_jobs import Job, StateDigest, each_job, job_sums, state_digest
from anabranch.deploy.delta_states import HeldPieces
from anabranch.kernels.delta_chunk import Piece
from anabranch.kernels.delta_dtypes import Bits
from anabranch.kernels.delta_plan import plan_jobs
from anabranch.kernels.digest import tensor_digest
from anabranch.schemas.errors import DeltaError
from anabranch.schemas.layout import Layout, root_digest

LAYOUT = Layout.build([("a", "bf16", (1000,)), ("b", "f32", (30, 20)), ("c", "bf16", (7,)), ("none", "u8", (0, 3))])


@pytest.fixture(autouse=True)
def _small_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plan_jobs.__kwdefaults__, "chunk_elements", 64)


class Numbers:
    """A state whose elements count up."""

    layout = LAYOUT

    def pieces(self, wanted: Job) -> list[Bits]:
        dtypes = {"bf16": np.uint16, "f32": np.uint32}
        return [np.arange(p.start, p.stop, dtype=dtypes[LAYOUT.tensors[p.tensor].dtype]) for p in wanted]


def expected() -> str:
    arrays = {
        "a": np.arange(1000, dtype=np.uint16),
        "b": np.arange(600, dtype=np.uint32),
        "c": np.arange(7, dtype=np.uint16),
    }
    return root_digest(LAYOUT, {**{n: tensor_digest(a) for n, a in arrays.items()}, "none": "0" * 32})


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_digest_in_pieces_is_that_of_the_whole(threads: int) -> None:
    assert state_digest(Numbers(), "reading", threads=threads) == expected()


def test_jobs_may_come_in_any_order_and_all_of_them_must() -> None:
    jobs = plan_jobs(LAYOUT)
    assert len(jobs) > 10
    digest = StateDigest(LAYOUT)
    for job in reversed(jobs[1:]):
        digest.add(job, job_sums(job, Numbers().pieces(job)))
    with pytest.raises(AssertionError, match="every element is taken in once"):
        digest.hexdigest()
    digest.add(jobs[0], job_sums(jobs[0], Numbers().pieces(jobs[0])))
    assert digest.hexdigest() == expected()


def test_few_jobs_are_in_memory() -> None:
    alive = most = 0
    lock = threading.Lock()

    def work(job: Job) -> None:
        nonlocal alive, most
        with lock:
            alive += 1
            most = max(most, alive)

    def take(job: Job, _: None) -> None:
        nonlocal alive
        time.sleep(0.001)
        with lock:
            alive -= 1

    each_job(LAYOUT, work, take, "working", threads=3)
    assert most <= 4
    assert alive == 0


def test_no_thread_is_left_when_a_job_fails() -> None:
    busy = 0
    bad = plan_jobs(LAYOUT)[5]

    def work(job: Job) -> int:
        nonlocal busy
        busy += 1
        try:
            if job == bad:
                raise DeltaError("broken")
            time.sleep(0.01)
            return job[0].start
        finally:
            busy -= 1

    taken: list[int] = []
    with pytest.raises(DeltaError, match="broken"):
        each_job(LAYOUT, work, lambda _, start: taken.append(start), "working", threads=4)
    assert busy == 0
    assert taken == sorted(taken)
    assert len(taken) == 5


def test_held_pieces_are_all_that_can_be_read() -> None:
    held = HeldPieces(LAYOUT, [Piece(0, 10, 20), Piece(0, 40, 50)], [np.arange(10, dtype=np.uint16)] * 2)
    assert list(held.read("a", 42, 45)) == [2, 3, 4]
    for name, start, stop in (("a", 0, 5), ("a", 15, 25), ("b", 10, 20)):
        with pytest.raises(DeltaError, match="not among its own"):
            held.read(name, start, stop)
